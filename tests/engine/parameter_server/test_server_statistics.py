"""Figures of parameter servers."""

from __future__ import annotations

from collections import Counter

from lightning_multigpu.engine.parameter_server.server_statistics import ServerStatistics, summary


def counted(steps: int, staleness: dict[int, dict[int, int]]) -> ServerStatistics:
    full = {
        "bytes_in": 10 * steps,
        "bytes_out": 20 * steps,
        "staleness": {worker: Counter(found) for worker, found in staleness.items()},
    }
    empty = {"bytes_in": 1, "bytes_out": 2, "staleness": {}}
    return ServerStatistics.of([empty, full])


def test_counts_of_an_interval_are_those_since_the_last() -> None:
    before = counted(4, {0: {0: 3}})
    fresh = counted(10, {0: {0: 3, 1: 2}, 1: {4: 1}}).since(before)
    assert fresh.bytes_in == [0, 60]
    assert fresh.bytes_out == [0, 120]
    assert fresh.staleness == {0: Counter({1: 2}), 1: Counter({4: 1})}


def test_a_summary_of_counts_is_that_of_the_numbers() -> None:
    assert summary(Counter({0: 1})) == {"median": 0, "p95": 0, "max": 0}
    assert summary(Counter({3: 10, 1: 9, 7: 0})) == {"median": 3, "p95": 3, "max": 3}
    assert summary(Counter({0: 94, 2: 1, 5: 5})) == {"median": 0, "p95": 2, "max": 5}
