"""Profiles of runs that never were."""

from __future__ import annotations

from typing import Any

from lightning_multigpu.report import profile_document

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
        step = {"start_s": start_s, "end_s": at_s, "batches": 1, "parts": parts, "callbacks_s": {}}
        steps.append({**step, "transfers": transfers})
    return {
        "rank": rank, "node": 0, "host": f"host<{rank}>", "threads": 1, "cores": 2, "data_workers": 0,
        "clock": {"offset_s": ahead_s, "error_s": 1e-4}, "steps": steps, "reads": [],
        "operators": [("aten::mm", 7, 0.003, 0.0)], "trial": None, "stages": None,
    }  # fmt: skip


def profile(strategy: str = "ring_ddp", ranks: int = 2, **phases_s: float) -> dict[str, Any]:
    measured = [told(rank, ahead_s=7.0 * rank, **phases_s) for rank in range(ranks)]
    return profile_document.build(measured, strategy=strategy, options={}, versions={"torch": "2"})
