"""Lines of a table that compares times with those of a peer, which were measured in turns in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

_NAME, _CELL = 18, 28


def columns(ours: str, peer: str) -> str:
    """The line above the others."""
    return f"{'':{_NAME}} {ours:{_CELL}} {peer:{_CELL}} ratio"


def compared(name: str, ours: Sequence[float], peer: Sequence[float], *, digits: int = 1) -> str:
    """Medians, quartiles, and the median of the turns' ratios.

    Args:
        name: of the line.
        ours: seconds of each turn.
        peer: those of the peer, in the same turns.
        digits: of the times, which are in ms.
    """
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return (
        f"{name:{_NAME}} {median_ms(ours, digits):{_CELL}} {median_ms(peer, digits):{_CELL}} "
        f"{statistics.median(ours) / statistics.median(peer):.3f}; "
        f"turn by turn {middle:.3f} ({low:.3f} to {high:.3f})"
    )


def median_ms(seconds: Sequence[float], digits: int = 1) -> str:
    """Median and quartiles."""
    low, middle, high = (1e3 * value for value in statistics.quantiles(seconds, n=4))
    return f"{middle:7.{digits}f} ms ({low:.{digits}f} to {high:.{digits}f})"
