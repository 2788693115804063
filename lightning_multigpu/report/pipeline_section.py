"""The pipeline section of a report: the ranks' use of a step, compared with theory, and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_multigpu.planning.timeline import (
    BUSY,
    Timeline,
    bubble,
    median_step,
    same_work,
    usage,
)
from lightning_multigpu.report.document import RankRecord
from lightning_multigpu.report.schedule_picture import Panel, draw


@dataclass(frozen=True)
class PipelineTimes:
    """A step of one pipeline, as measured and in theory; each has a timeline for each rank, by position."""

    num_micro_batches: int
    measured: Sequence[Timeline]
    theory: Sequence[Timeline]


class PipelineReport:
    """The pipelines of a run, side by side.

    Args:
        records: of all ranks, with their stages' steps and memory.
    """

    def __init__(self, records: Sequence[RankRecord]) -> None:
        by_pipeline: dict[int, list[tuple[int, RankRecord]]] = {}
        for record in records:
            if record.stages is not None:
                by_pipeline.setdefault(record.stages.pipeline, []).append((record.stages.position, record))
        self.pipelines = [
            [record for _, record in sorted(of, key=lambda p: p[0])] for _, of in sorted(by_pipeline.items())
        ]
        self.times = [_times(ranks) for ranks in self.pipelines]

    def section(self) -> dict[str, Any] | None:
        """The section as in :mod:`lightning_multigpu.report.schema`; None without a pipeline."""
        if not self.pipelines:
            return None
        stages = self.pipelines[0][0].stages
        assert stages is not None
        return {
            "schedule": stages.schedule,
            "stages_per_rank": stages.stages_per_rank,
            "pipelines": [_entry(ranks, times) for ranks, times in zip(self.pipelines, self.times, strict=True)],
        }

    def picture(self) -> str | None:
        """The schedule of the first timed pipeline, in theory and as measured, as SVG; None if none was timed."""
        timed = [(ranks, times) for ranks, times in zip(self.pipelines, self.times, strict=True) if times is not None]
        if not timed:
            return None
        ranks, times = timed[0]
        assert ranks[0].stages is not None
        title = f"{ranks[0].stages.schedule}, {times.num_micro_batches} micro-batches"
        theory = f"{title}, in theory (the same work in equal stages, messages in no time)"
        labels = [f"rank {record.rank}" for record in ranks]
        panels = ((theory, times.theory), (f"{title}, as measured", times.measured))
        return draw([Panel(f"{name}: bubble {100 * bubble(lines):.1f} %", labels, lines) for name, lines in panels])


def _times(ranks: Sequence[RankRecord]) -> PipelineTimes | None:
    stages = [record.stages for record in ranks if record.stages is not None]
    steps = median_step([of_rank.steps for of_rank in stages], [record.node for record in ranks])
    if not steps:
        return None
    count = steps[0].num_micro_batches
    measured = [step.timeline for step in steps]
    return PipelineTimes(count, measured, same_work(measured, stages[0].schedule, stages[0].stages_per_rank, count))


def _entry(ranks: Sequence[RankRecord], times: PipelineTimes | None) -> dict[str, Any]:
    entries = [_held(record) for record in ranks]
    if times is None:
        return {"ranks": entries}
    measured, theory = usage(times.measured), usage(times.theory)
    for entry, mine, ideal in zip(entries, measured, theory, strict=True):
        entry.update({f"{kind}_passes": mine.passes[kind] for kind in BUSY})
        entry.update({f"{kind}_s": seconds for kind, seconds in mine.seconds.items()})
        entry.update(idle_s=mine.idle_s, bubble=mine.bubble, theoretical_bubble=ideal.bubble)
    return {
        "num_micro_batches": times.num_micro_batches,
        "wall_s": measured[0].wall_s,
        "bubble": bubble(times.measured),
        "theoretical_bubble": bubble(times.theory),
        "ranks": entries,
    }


def _held(record: RankRecord) -> dict[str, Any]:
    stages = record.stages
    assert stages is not None
    last = stages.num_ranks * stages.stages_per_rank
    memory = {name: size for name, size in asdict(stages.memory).items() if size is not None}
    return {"rank": record.rank, "stages": list(range(stages.position, last, stages.num_ranks)), **memory}
