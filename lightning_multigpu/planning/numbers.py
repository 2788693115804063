"""Numbers and sizes as text."""

from __future__ import annotations

import math

BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def number(value: float) -> str:
    """Three significant digits, or all digits before the point; never an exponent."""
    digits_before_point = math.floor(math.log10(abs(value))) + 1 if value else 1
    return f"{value:,.{max(0, 3 - digits_before_point)}f}"


def ms(seconds: float) -> str:
    """Milliseconds with the unit: 12.3 ms."""
    return f"{number(1e3 * seconds)} ms"


def size(size_bytes: float) -> str:
    """Bytes with a unit: 12.3 MB."""
    for unit, unit_bytes in BYTES:
        if abs(size_bytes) >= unit_bytes:
            return f"{number(size_bytes / unit_bytes)} {unit}"
    return f"{number(size_bytes)} B"
