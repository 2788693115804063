"""Options of compressors: what is wrong with one is said with its value, its limit and the fix."""

from __future__ import annotations


def require_int(name: str, value: object, *, at_least: int, why: str) -> None:
    """Raises ValueError where ``value`` is no integer, or below the limit."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name}={value!r}: {why}; use an integer of {at_least} or more")
