"""A report made by hand, and documents that follow their schema."""

import json
from typing import Any

from lightning_multigpu.callbacks.monitor import KEYS
from lightning_multigpu.report.document import RankRecord, RunDocument, RunFacts, build, encoded
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


def document_of(*records: RankRecord, strategy: str = "ring_ddp", options: Any = None, **more: Any) -> RunDocument:
    named = {"name": strategy, "options": options or {}}
    return build(records, FACTS, strategy=named, versions={"torch": "2.13.0"}, aggregations=KEYS, **more)


def report_of(*records: RankRecord, **options: Any) -> dict[str, Any]:
    """As JSON, and back again."""
    found = document_of(*records, options=options)
    written: dict[str, Any] = json.loads(encoded(as_json(found)))
    assert from_json(RunDocument, written) == found
    return written


def assert_follows_schema(report: dict[str, Any]) -> None:
    assert as_json(from_json(RunDocument, report)) == report
    assert [rank["rank"] for rank in report["ranks"]] == list(range(report["world"]["size"]))
    assert len(report["world"]["hosts"]) == report["world"]["nodes"]
