"""The pipelines of a profile: how their ranks use a step, compared with theory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_multigpu.planning.pipelines.pipeline_figures import PipelineFigures
from lightning_multigpu.planning.pipelines.timeline import (
    StageRecord,
    Timeline,
    bubble,
    median_step,
    same_work,
    usage,
)
from lightning_multigpu.report.profile.profile_document import MeasuredRank, PipelineRank, PipelineStep
from lightning_multigpu.report.schedule_picture import Panel, draw


@dataclass(frozen=True)
class TimedPipeline:
    """The ranks of a pipeline by position, and the timelines of its median step as measured and in theory."""

    ranks: Sequence[int]
    schedule: str
    stages_per_rank: int
    num_micro_batches: int
    measured: Sequence[Timeline]
    theory: Sequence[Timeline]

    def step(self) -> PipelineStep:
        """The step as a document has it."""
        used = usage(self.measured)
        return PipelineStep(
            schedule=self.schedule,
            num_micro_batches=self.num_micro_batches,
            wall_s=used[0].wall_s,
            bubble=bubble(self.measured),
            theoretical_bubble=bubble(self.theory),
            ranks=[
                PipelineRank(rank=rank, seconds={**mine.seconds, "idle": mine.idle_s}, bubble=mine.bubble)
                for rank, mine in zip(self.ranks, used, strict=True)
            ],
        )

    def figures(self) -> PipelineFigures:
        """The step for its diagnosis."""
        timelines = dict(zip(self.ranks, self.measured, strict=True))
        return PipelineFigures.of(timelines, self.schedule, self.stages_per_rank, self.num_micro_batches)

    def picture(self) -> str:
        """The schedule in theory and as measured, as SVG."""
        title = f"{self.schedule}, {self.num_micro_batches} micro-batches"
        theory = f"{title}, in theory (the same work in equal stages, messages in no time)"
        labels = [f"rank {rank}" for rank in self.ranks]
        panels = ((theory, self.theory), (f"{title}, as measured", self.measured))
        return draw([Panel(f"{name}: bubble {100 * bubble(lines):.1f} %", labels, lines) for name, lines in panels])


def timed_pipelines(ranks: Sequence[MeasuredRank]) -> list[TimedPipeline]:
    """The pipelines side by side, without those of which no step was timed."""
    of_pipelines: dict[int, list[tuple[MeasuredRank, StageRecord]]] = {}
    for rank in ranks:
        if rank.stages is not None:
            of_pipelines.setdefault(rank.stages.pipeline, []).append((rank, rank.stages))
    found = []
    for _, members in sorted(of_pipelines.items()):
        members.sort(key=lambda member: member[1].position)
        first = members[0][1]
        if steps := median_step([stages.steps for _, stages in members], [rank.node for rank, _ in members]):
            measured, count = [step.timeline for step in steps], steps[0].num_micro_batches
            theory = same_work(measured, first.schedule, first.stages_per_rank, count)
            numbers = [rank.rank for rank, _ in members]
            found.append(TimedPipeline(numbers, first.schedule, first.stages_per_rank, count, measured, theory))
    return found
