"""The size of gradient buckets: a default, or measured at the start of a run.

Let S be the bytes of all gradients, b the bytes of a bucket, and a b + c the seconds that a bucket takes. Communication
takes S/b buckets of a b + c seconds; at least the last bucket cannot hide behind backward, since it is full only when
backward is over. The sum S a + S c/b + a b + c is smallest at b = sqrt(S c / a).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_multigpu.communication.metering.clocks import timed

SMALLEST_BYTES = 64 << 10
_PROBE_BYTES = (16 << 10, 512 << 10, 2 << 20)
_REPETITIONS = 5


@dataclass(frozen=True)
class TransferCost:
    """The time of an all-reduce as a function of size.

    Attributes:
        latency_s: seconds that even the smallest tensor takes.
        s_per_byte: seconds that each byte adds.
    """

    latency_s: float
    s_per_byte: float

    def seconds(self, num_bytes: int) -> float:
        """The time for a tensor of this size."""
        return self.latency_s + num_bytes * self.s_per_byte


def best_bucket_bytes(cost: TransferCost, total_bytes: int) -> int:
    """The bucket size that leaves the least time unhidden for ``total_bytes`` of gradients.

    Between :data:`SMALLEST_BYTES` and ``total_bytes``.
    """
    if cost.s_per_byte <= 0:
        return max(total_bytes, SMALLEST_BYTES)
    best = math.sqrt(total_bytes * max(cost.latency_s, 0.0) / cost.s_per_byte)
    return round(min(max(best, SMALLEST_BYTES), max(total_bytes, SMALLEST_BYTES)))


def measure(all_reduce: Callable[[Tensor], object], device: torch.device) -> TransferCost:
    """Times ``all_reduce``, which averages a flat tensor in place over all ranks; a collective.

    All ranks return the same cost, to the last bit: the average of their measurements.
    """
    all_reduce(torch.ones(1, device=device))  # the first call connects
    seconds = [_median_seconds(all_reduce, num_bytes, device) for num_bytes in _PROBE_BYTES]
    agreed = torch.tensor(seconds, dtype=torch.float64, device=device)
    all_reduce(agreed)
    return fitted(_PROBE_BYTES, agreed.tolist())


def fitted(num_bytes: Sequence[int], seconds: Sequence[float]) -> TransferCost:
    """The straight line through the smallest and the largest transfer; latency and slope are at least zero."""
    slope = (seconds[-1] - seconds[0]) / (num_bytes[-1] - num_bytes[0])
    slope = max(slope, 0.0)
    return TransferCost(max(seconds[0] - slope * num_bytes[0], 0.0), slope)


def _median_seconds(all_reduce: Callable[[Tensor], object], num_bytes: int, device: torch.device) -> float:
    tensor = torch.ones(num_bytes // 4, device=device)
    return statistics.median(timed(lambda: all_reduce(tensor), device) for _ in range(_REPETITIONS))
