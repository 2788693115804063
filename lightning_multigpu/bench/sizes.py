"""Sizes of messages as text: "64k", "1MiB"."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "b": 1,
    "k": 2**10,
    "kib": 2**10,
    "kb": 10**3,
    "m": 2**20,
    "mib": 2**20,
    "mb": 10**6,
    "g": 2**30,
    "gib": 2**30,
    "gb": 10**9,
}


def size_bytes(text: str) -> int:
    """The size in bytes: "64k" and "64KiB" are 65,536, "64kB" is 64,000.

    Raises:
        ValueError: not a number above 0 with one of the units, or no whole number of bytes.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    value = float(match[1]) * _UNITS.get(match[2], 0) if match else 0.0
    if value < 1 or value != int(value):
        raise ValueError(
            f"size {text!r}: pass a whole number of bytes, or one with a unit, such as 64k or 1MiB; k, M and G (or "
            "KiB, MiB, GiB) are powers of 1024, kB, MB and GB of 1000"
        )
    return int(value)


def size_text(size: int) -> str:
    """The size in the largest unit of 1024 that divides it: 65,536 is "64 KiB"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def geometric_sizes(smallest: int, largest: int, factor: int) -> list[int]:
    """``smallest``, ``smallest * factor``, ... up to ``largest``, in bytes; ``factor`` is 2 or more.

    Raises:
        ValueError: ``largest`` is below ``smallest``.
    """
    if largest < smallest:
        raise ValueError(f"--max-size={largest} is below --min-size={smallest} (bytes); swap them")
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    return sizes
