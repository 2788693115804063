"""Rates and sizes in the notation of ``tc``: "1gbit" per second, "512kb"."""

from __future__ import annotations

import re
from collections.abc import Mapping

# tc counts bits in powers of 1000 and bytes in powers of 1024.
_BITS_PER_S = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_BYTES = {"b": 1, "kb": 2**10, "mb": 2**20, "gb": 2**30}


def bits_per_s(rate: str) -> int:
    """The rate in bits per second: "1gbit" is 1,000,000,000.

    Raises:
        ValueError: not a positive number followed by bit, kbit, mbit, gbit or tbit.
    """
    return _parse("bandwidth", rate, _BITS_PER_S, example="1gbit")


def size_bytes(size: str) -> int:
    """The size in bytes: "512kb" is 524,288.

    Raises:
        ValueError: not a positive number followed by b, kb, mb or gb.
    """
    return _parse("burst", size, _BYTES, example="512kb")


def _parse(name: str, text: str, units: Mapping[str, int], *, example: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]+)", text.lower()) if isinstance(text, str) else None
    value = float(match[1]) * units.get(match[2], 0) if match else 0.0
    if value < 1:
        raise ValueError(
            f"{name}={text!r}: expected a positive number and a unit ({', '.join(units)}), such as {name}={example!r}"
        )
    return round(value)
