"""Sizes of messages as text: "64k", "1MiB"."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError


def size_bytes(text: str) -> int:
    """The size in bytes: "64k" and "64KiB" are 65,536, "64kB" is 64,000.

    Raises:
        ArgumentTypeError: not a number above 0 with one of the units, or no whole number of bytes.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:b|([kmg])(i?b)?)?", text.strip().lower())
    unit = (1000 if match[3] == "b" else 1024) ** (1 + "kmg".index(match[2])) if match and match[2] else 1
    value = float(match[1]) * unit if match else 0.0
    if value < 1 or value != int(value):
        raise ArgumentTypeError(
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
