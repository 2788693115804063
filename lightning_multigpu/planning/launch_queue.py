"""The launches of a GPU's kernels in a step: whether the host runs ahead of the GPU."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low


@dataclass(frozen=True)
class LaunchQueue:
    """Kernels between their launch by the host and their start on the GPU::

        host    L0 L1 L2 L3              launches
        GPU        [k0][k1  ][k2][k3]    at L3, k1 and k2 wait: 2 are queued

    Attributes:
        kernels: the number of kernels.
        busy_s: seconds in which at least one kernel runs.
        queued: kernels that wait for their start when another one is launched; the median over all launches.
    """

    kernels: int
    busy_s: float
    queued: int

    @classmethod
    def of(cls, kernels: Sequence[tuple[float, float, float]]) -> LaunchQueue | None:
        """The queue of a step; None without a kernel.

        Args:
            kernels: the times of each kernel's launch, start and end, on one clock.
        """
        if not kernels:
            return None
        launches = sorted(launch_s for launch_s, _, _ in kernels)
        starts = sorted(start_s for _, start_s, _ in kernels)
        queued = [bisect_left(launches, launch_s) - bisect_right(starts, launch_s) for launch_s in launches]
        busy_s, until_s = 0.0, starts[0]
        for start_s, end_s in sorted((start_s, end_s) for _, start_s, end_s in kernels):
            busy_s += max(0.0, end_s - max(start_s, until_s))
            until_s = max(until_s, end_s)
        return cls(len(kernels), busy_s, max(0, median_low(queued)))
