"""Numbers and sizes as text, and the usual size of a bucket of gradients."""

from __future__ import annotations

import math

ON_ONE_HOST_BYTES, BETWEEN_HOSTS_BYTES = 25 << 20, 4 << 20
_MOST_BUCKETS = 128
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


def usual_bucket_bytes(total_bytes: int, *, between_hosts: bool) -> int:
    """The default size for the ring, or for shared memory on one host; more for large models.

    On a link of 1 Gbit/s the first bucket of 4 MiB travels during most of backward. On one host there is little time to
    hide, and every bucket makes ranks wait for each other once more.
    """
    usual = BETWEEN_HOSTS_BYTES if between_hosts else ON_ONE_HOST_BYTES
    return max(usual, -(-total_bytes // _MOST_BUCKETS))
