"""The cores of this process."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """CPU cores that this process may use: in a container or under taskset fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
