"""Figures of parameter servers: bytes, and the staleness of each worker's updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any


@dataclass(frozen=True)
class ServerStatistics:
    """The counts of all servers of a job, in their order.

    Args:
        bytes_in: received by each server, through sockets or memory.
        bytes_out: sent by each server, likewise.
        staleness: how often the updates of each asynchronous worker had which staleness; empty where training is
            synchronous.
    """

    bytes_in: Sequence[int]
    bytes_out: Sequence[int]
    staleness: Mapping[int, Counter[int]]

    @classmethod
    def of(cls, answers: Sequence[Mapping[str, Any]]) -> ServerStatistics:
        """Reads the answers of the servers. Every server that holds weights counts every update."""
        staleness: Mapping[int, Counter[int]] = next(
            (answer["staleness"] for answer in answers if answer["staleness"]), {}
        )
        return cls([answer["bytes_in"] for answer in answers], [answer["bytes_out"] for answer in answers], staleness)

    def since(self, before: ServerStatistics) -> ServerStatistics:
        """The counts since earlier ones."""
        bytes_in, bytes_out = (
            [now - then for now, then in zip(*counts, strict=True)]
            for counts in ((self.bytes_in, before.bytes_in), (self.bytes_out, before.bytes_out))
        )
        staleness = {worker: now - before.staleness.get(worker, Counter()) for worker, now in self.staleness.items()}
        return ServerStatistics(bytes_in, bytes_out, staleness)

    def section(self) -> dict[str, Any]:
        """The section ``parameter_servers`` of a run's report."""
        return {
            "servers": [
                {"server": k, "bytes_in": bytes_in, "bytes_out": bytes_out}
                for k, (bytes_in, bytes_out) in enumerate(zip(self.bytes_in, self.bytes_out, strict=True))
            ],
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
