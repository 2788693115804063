"""A report made by hand, for the tests."""

from __future__ import annotations

from typing import Any

from lightning_multigpu.callbacks.monitor import KEYS
from lightning_multigpu.report.document import NamedStrategy, RankRecord, RunFacts, build
from lightning_multigpu.report.schema import as_json, from_json
from lightning_multigpu.report.statistics import Statistics

ABOUT: dict[str, Any] = {
    "date": "2026-11-22T12:00:00Z",
    "wall_s": 12.5,
    "model": {"class": "shop.Net", "parameters": 100, "trainable_parameters": 90},
    "precision": "32-true",
    "hardware": {
        "device": "cpu", "threads_per_rank": 1, "processor": "Z80", "cores": 2, "usable_cores": 2,
        "memory_bytes": 65_536, "gpus": [], "system": "CP/M 2.2",
    },
}  # fmt: skip
FACTS = from_json(RunFacts, ABOUT)


def constant(value: float) -> Statistics:
    return {"median": value, "p95": value, "mean": value, "last": value}


def record(rank: int, *, node: int = 0, host: str = "alpha", steps: int = 10, **metrics: float) -> RankRecord:
    """A rank whose metrics are constant; ``throughput__samples_per_sec=1`` stands for that key."""
    named = {name.replace("__", "/"): constant(value) for name, value in metrics.items()}
    return RankRecord(rank=rank, node=node, host=host, steps=steps, metrics=named)


def report_of(*records: RankRecord, **options: Any) -> dict[str, Any]:
    strategy = NamedStrategy(name="ring_ddp", options=options)
    found: dict[str, Any] = as_json(
        build(records, FACTS, strategy=strategy, versions={"torch": "2.13.0"}, aggregations=KEYS)
    )
    return found
