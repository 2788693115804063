"""Profiles of runs that never were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lightning_multigpu.engine.parameter_server.server_statistics import ServerStatistics
from lightning_multigpu.planning.pipelines.schedule_order import schedule_orders
from lightning_multigpu.planning.pipelines.timeline import HeldBytes, StageMemory, StageRecord, StepTimeline, predicted
from lightning_multigpu.report.document import NamedStrategy
from lightning_multigpu.report.profile import profile_of_ranks
from lightning_multigpu.report.profile.profile_document import ProfileDocument
from lightning_multigpu.report.schema import as_json, from_json

PHASES_S = {"data_wait": 0.05, "forward": 0.02, "backward": 0.04, "communication": 0.01, "optimizer": 0.005}


def told(rank: int, *, ahead_s: float = 0.0, **phases_s: float) -> dict[str, Any]:
    """What a rank measures: two equal steps on a clock that is ahead of that of rank 0."""
    phases = {**PHASES_S, **phases_s}
    steps, at_s = [], 100.0 + ahead_s
    for _ in range(2):
        start_s, parts = at_s, []
        for phase, seconds in phases.items():
            parts.append([phase, at_s, at_s + seconds])
            at_s += seconds
        begin_s, end_s = next((a, b) for name, a, b in parts if name == "communication")
        transfers = [["all_reduce", "data", 2, begin_s - 0.02, end_s, 1000, 1000, 0]]
        step = {"start_s": start_s, "end_s": at_s, "batches": 1, "parts": parts}
        steps.append({**step, "transfers": transfers})
    return {
        "rank": rank, "node": 0, "host": f"host<{rank}>", "threads": 1, "cores": 2, "data_workers": 0,
        "clock_offset_s": ahead_s, "callbacks_s": {}, "steps": steps, "reads": [],
        "operators": [("aten::mm", 7, 0.003, 0.0)], "stages": None,
    }  # fmt: skip


def profile(strategy: str = "ring_ddp", ranks: int = 2, **phases_s: float) -> dict[str, Any]:
    measured = [told(rank, ahead_s=7.0 * rank, **phases_s) for rank in range(ranks)]
    return built(measured, strategy)


def built(measured: list[dict[str, Any]], strategy: str) -> dict[str, Any]:
    named = NamedStrategy(name=strategy, options={})
    return dict(as_json(profile_of_ranks.build(measured, strategy=named, versions={"torch": "2"})))


def loaded(profile: Mapping[str, Any]) -> ProfileDocument:
    return from_json(ProfileDocument, profile)


def with_all() -> dict[str, Any]:
    """A profile with every section, those of a pipeline and of parameter servers side by side."""
    measured = [told(rank, ahead_s=7.0 * rank, communication=0.05) for rank in range(2)]
    timelines = predicted(schedule_orders("gpipe", 2, 1, 2), [0.01, 0.01], [0.02, 0.02], [0.0])
    staleness = {0: Counter({0: 3, 1: 5}), 1: Counter({1: 7, 20: 1})}
    servers = ServerStatistics((4000, 1000), (4000, 1000), staleness)
    for rank, (of_rank, timeline) in enumerate(zip(measured, timelines, strict=True)):
        memory = StageMemory(4_000_000, 4_000_000, 8_000_000, 19_000_000)
        of_rank["stages"] = asdict(
            StageRecord(
                pipeline=0, position=rank, num_ranks=2, stages_per_rank=1, schedule="gpipe",
                steps=(StepTimeline(1, 2, timeline),), memory=memory, predicted=HeldBytes(1, 1, 1),
            )
        )  # fmt: skip
        counted = {"activations_bytes": 2_000_000 * (1 + rank)}
        of_rank |= {"memory": asdict(memory) | counted, "limit": ("GPU", 20_000_000)}
        of_rank["launches"] = {"kernels": 40, "busy_s": 0.02, "queued": 1}
        of_rank["whole_run"] = {
            "throughput/samples_per_sec": (89.5, 80.0, 100.0),
            "device/utilization_percent": (60.0, 70.0, 80.0),
            "device/memory_used_bytes": (15e6, 15e6, 19.5e6),
        }
    measured[0]["servers"] = servers.section()
    return built(measured, "async_ps")
