"""The pipelines of a profile: how their ranks use a step, compared with theory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_multigpu.planning.pipelines.pipeline_figures import PipelineFigures
from lightning_multigpu.planning.pipelines.timeline import StageRecord, Timeline, bubble, median_step, same_work
from lightning_multigpu.report.schedule_picture import draw


@dataclass(frozen=True, kw_only=True)
class TimedPipeline:
    """A pipeline's step with the median wall time among the newest nine that ran all micro-batches together.

    On GPUs one step in 16 is timed.

    Attributes:
        ranks: by position in the pipeline.
        timelines: of these ranks, as measured, on the clock of the first one.
    """

    ranks: Sequence[int]
    schedule: str
    stages_per_rank: int
    num_micro_batches: int
    timelines: Sequence[Timeline]

    @property
    def theory(self) -> list[Timeline]:
        """The same work in equal stages, whose messages take no time."""
        return same_work(self.timelines, self.schedule, self.stages_per_rank, self.num_micro_batches)

    def figures(self) -> PipelineFigures:
        """The step for its diagnosis."""
        timelines = dict(zip(self.ranks, self.timelines, strict=True))
        return PipelineFigures.of(timelines, self.schedule, self.stages_per_rank, self.num_micro_batches)

    def picture(self) -> str:
        """The schedule in theory and as measured, as SVG."""
        title = f"{self.schedule}, {self.num_micro_batches} micro-batches"
        theory = f"{title}, in theory (the same work in equal stages, messages in no time)"
        labels = [f"rank {rank}" for rank in self.ranks]
        panels = {theory: self.theory, f"{title}, as measured": self.timelines}
        return draw({f"{name}: bubble {100 * bubble(each):.1f} %": each for name, each in panels.items()}, labels)


def timed_pipelines(records: Sequence[tuple[int, int, StageRecord]]) -> list[TimedPipeline]:
    """The pipelines side by side, without those of which no step was timed; a rank, its node and its record each."""
    found = []
    for pipeline in sorted({record.pipeline for *_, record in records}):
        members = sorted((each for each in records if each[2].pipeline == pipeline), key=lambda each: each[2].position)
        first = members[0][2]
        if steps := median_step([record.steps for *_, record in members], [node for _, node, _ in members]):
            found.append(
                TimedPipeline(
                    ranks=[rank for rank, *_ in members],
                    schedule=first.schedule,
                    stages_per_rank=first.stages_per_rank,
                    num_micro_batches=steps[0].num_micro_batches,
                    timelines=[step.timeline for step in steps],
                )
            )
    return found
