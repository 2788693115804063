"""Figures of parameter servers: the sizes of their shards, and the staleness of each worker's updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any


@dataclass(frozen=True)
class ServerStatistics:
    """The figures of all servers of a job.

    Attributes:
        weights_bytes: of each server's shards of the weights.
        staleness: how often the updates of each asynchronous worker had which staleness, since the servers started;
            empty where training is synchronous.
    """

    weights_bytes: Sequence[int]
    staleness: Mapping[int, Counter[int]]

    def section(self) -> dict[str, Any]:
        """The section ``parameter_servers`` of a run's report."""
        return {
            "servers": [{"server": k, "weights_bytes": size} for k, size in enumerate(self.weights_bytes)],
            "workers": [
                {"rank": worker, "updates": counts.total(), "staleness": summary(counts)}
                for worker, counts in self.staleness.items()
            ],
        }


def summary(counts: Counter[int]) -> dict[str, int]:
    """Median, 95th percentile and largest of numbers that are counted, of which there is one at least."""
    ordered = sorted(+counts)
    up_to = list(accumulate(counts[number] for number in ordered))

    def quantile(share: float) -> int:
        return next(number for number, many in zip(ordered, up_to, strict=True) if many >= share * up_to[-1])

    return {"median": quantile(0.5), "p95": quantile(0.95), "max": ordered[-1]}
