"""Figures of parameter servers."""

from __future__ import annotations

from collections import Counter

from lightning_multigpu.engine.parameter_server.server_statistics import summary


def test_a_summary_of_counts_is_that_of_the_numbers() -> None:
    assert summary(Counter({0: 1})) == {"median": 0, "p95": 0, "max": 0}
    assert summary(Counter({3: 10, 1: 9, 7: 0})) == {"median": 3, "p95": 3, "max": 3}
    assert summary(Counter({0: 94, 2: 1, 5: 5})) == {"median": 0, "p95": 2, "max": 5}
