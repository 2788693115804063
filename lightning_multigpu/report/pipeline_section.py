"""The pipeline section of a report: the ranks' use of a step, compared with theory, and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_multigpu.planning.pipelines.pipeline_figures import PipelineFigures
from lightning_multigpu.planning.pipelines.timeline import (
    BUSY,
    StageRecord,
    Timeline,
    bubble,
    median_step,
    same_work,
    usage,
)
from lightning_multigpu.report.document import PipelineRank, PipelineSection, PipelineStep, RankRecord
from lightning_multigpu.report.schedule_picture import Panel, draw

if TYPE_CHECKING:
    from lightning_multigpu.report.profile.profile_document import MeasuredRank


@dataclass(frozen=True)
class _Pipeline:
    """The ranks of one pipeline, and the timelines of its median step as measured and in theory, by position.

    Without a timed step there are no timelines.
    """

    ranks: Sequence[RankRecord | MeasuredRank]
    stages: Sequence[StageRecord]
    num_micro_batches: int
    measured: Sequence[Timeline]
    theory: Sequence[Timeline]


class PipelineReport:
    """The pipelines of a run, side by side.

    Args:
        records: of all ranks, with their stages' steps and memory.
    """

    def __init__(self, records: Sequence[RankRecord | MeasuredRank]) -> None:
        found: dict[int, list[tuple[RankRecord | MeasuredRank, StageRecord]]] = {}
        for record in records:
            if record.stages is not None:
                found.setdefault(record.stages.pipeline, []).append((record, record.stages))
        self._pipelines = [
            _pipeline(sorted(ranks, key=lambda rank: rank[1].position)) for _, ranks in sorted(found.items())
        ]

    def section(self) -> PipelineSection | None:
        """The section of a run's document; None without a pipeline."""
        if not self._pipelines:
            return None
        stages = self._pipelines[0].stages[0]
        return PipelineSection(
            schedule=stages.schedule,
            stages_per_rank=stages.stages_per_rank,
            pipelines=[_entry(pipeline) for pipeline in self._pipelines],
        )

    def figures(self) -> PipelineFigures | None:
        """The median step of the first pipeline, for its diagnosis; None without one, or if no step was timed."""
        if not self._pipelines or not self._pipelines[0].measured:
            return None
        first = self._pipelines[0]
        timelines = {rank.rank: timeline for rank, timeline in zip(first.ranks, first.measured, strict=True)}
        stages = first.stages[0]
        return PipelineFigures.of(timelines, stages.schedule, stages.stages_per_rank, first.num_micro_batches)

    def picture(self) -> str | None:
        """The schedule of the first timed pipeline, in theory and as measured, as SVG; None if none was timed."""
        timed = next((pipeline for pipeline in self._pipelines if pipeline.measured), None)
        if timed is None:
            return None
        title = f"{timed.stages[0].schedule}, {timed.num_micro_batches} micro-batches"
        theory = f"{title}, in theory (the same work in equal stages, messages in no time)"
        labels = [f"rank {record.rank}" for record in timed.ranks]
        panels = ((theory, timed.theory), (f"{title}, as measured", timed.measured))
        return draw([Panel(f"{name}: bubble {100 * bubble(lines):.1f} %", labels, lines) for name, lines in panels])


def _pipeline(ranks: Sequence[tuple[RankRecord | MeasuredRank, StageRecord]]) -> _Pipeline:
    records, stages = [record for record, _ in ranks], [of_rank for _, of_rank in ranks]
    steps = median_step([of_rank.steps for of_rank in stages], [record.node for record in records])
    if not steps:
        return _Pipeline(records, stages, 0, (), ())
    count = steps[0].num_micro_batches
    measured = [step.timeline for step in steps]
    theory = same_work(measured, stages[0].schedule, stages[0].stages_per_rank, count)
    return _Pipeline(records, stages, count, measured, theory)


def _entry(pipeline: _Pipeline) -> PipelineStep:
    held = [_memory(record.rank, stages) for record, stages in zip(pipeline.ranks, pipeline.stages, strict=True)]
    if not pipeline.measured:
        return PipelineStep(ranks=[PipelineRank(**of_rank) for of_rank in held])
    measured, theory = usage(pipeline.measured), usage(pipeline.theory)
    for of_rank, mine, ideal in zip(held, measured, theory, strict=True):
        of_rank.update({f"{kind}_passes": mine.passes[kind] for kind in BUSY})
        of_rank.update({f"{kind}_s": seconds for kind, seconds in mine.seconds.items()})
        of_rank.update(idle_s=mine.idle_s, bubble=mine.bubble, theoretical_bubble=ideal.bubble)
    return PipelineStep(
        num_micro_batches=pipeline.num_micro_batches,
        wall_s=measured[0].wall_s,
        bubble=bubble(pipeline.measured),
        theoretical_bubble=bubble(pipeline.theory),
        ranks=[PipelineRank(**of_rank) for of_rank in held],
    )


def _memory(rank: int, stages: StageRecord) -> dict[str, Any]:
    num_stages = stages.num_ranks * stages.stages_per_rank
    predicted = {f"predicted_{name}": size for name, size in vars(stages.predicted).items()}
    own = list(range(stages.position, num_stages, stages.num_ranks))
    return {"rank": rank, "stages": own, **vars(stages.memory), **predicted}
