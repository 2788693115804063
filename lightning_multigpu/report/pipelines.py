"""The pipelines of a profile: how their ranks use a step, in theory, and with each remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_multigpu.planning.pipelines.schedule_order import schedule_orders, step_time
from lightning_multigpu.planning.pipelines.timeline import (
    BUSY,
    StageRecord,
    Timeline,
    bubble,
    median_step,
    theoretical,
    usage,
)
from lightning_multigpu.report.schedule_picture import draw

_WORTH_DOUBLING = 0.05
"""Four times as many micro-batches are proposed if the second doubling saves this share of a step."""


@dataclass(frozen=True)
class PipelineFigures:
    """The measured step of a pipeline, and its prediction with each remedy.

    Attributes:
        wall_s: seconds from the first pass to the last.
        bubble: the share of ``wall_s`` in which ranks are not busy.
        num_micro_batches: micro-batches of the step.
        more_micro_batches: the proposed number of micro-batches.
        with_more_s: predicted ``wall_s`` with ``more_micro_batches``.
        balanced_s: predicted ``wall_s`` if all ranks had the same work.
        passes_s: predicted ``wall_s`` without messages, and without overhead of a pass.
        busy_s: rank -> seconds in which it is busy, in the order of the stages.
    """

    wall_s: float
    bubble: float
    num_micro_batches: int
    more_micro_batches: int
    with_more_s: float
    balanced_s: float
    passes_s: float
    busy_s: Mapping[int, float]


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
        shape = len(self.timelines), self.stages_per_rank, self.num_micro_batches
        busy_s = sum(i.seconds for timeline in self.timelines for i in timeline if i.kind in BUSY)
        return theoretical(self.schedule, *shape, unit_s=busy_s / (3 * math.prod(shape)))

    def figures(self) -> PipelineFigures:
        """The step for its diagnosis.

        A micro-batch of half the size is assumed to take half of the time. The rest of the measured time, messages
        and the overhead of passes, is assumed to stay.
        """
        forward_s, backward_s = self._pass_seconds("forward"), self._pass_seconds("backward", "weight")
        measured = usage(self.timelines)
        wall_s = measured[0].wall_s
        as_it_is_s, twice_s, four_times_s = (self._wall_s(forward_s, backward_s, more) for more in (1, 2, 4))
        more, with_more_s = (2, twice_s) if twice_s - four_times_s < _WORTH_DOUBLING * as_it_is_s else (4, four_times_s)
        return PipelineFigures(
            wall_s=wall_s,
            bubble=bubble(self.timelines),
            num_micro_batches=self.num_micro_batches,
            more_micro_batches=more * self.num_micro_batches,
            with_more_s=wall_s - as_it_is_s + with_more_s,
            balanced_s=wall_s - as_it_is_s + self._wall_s(_even(forward_s), _even(backward_s), 1),
            passes_s=as_it_is_s,
            busy_s={
                rank: sum(of.seconds[kind] for kind in BUSY) for rank, of in zip(self.ranks, measured, strict=True)
            },
        )

    def _pass_seconds(self, *kinds: str) -> list[float]:
        """Each stage's mean seconds for a micro-batch in passes of these kinds."""
        seconds = [0.0] * (len(self.ranks) * self.stages_per_rank)
        for interval in (each for timeline in self.timelines for each in timeline if each.kind in kinds):
            seconds[interval.stage] += interval.seconds / self.num_micro_batches
        return seconds

    def _wall_s(self, forward_s: Sequence[float], backward_s: Sequence[float], more: int) -> float:
        """The predicted step with ``more`` times as many micro-batches, whose messages take no time."""
        orders = schedule_orders(self.schedule, len(self.ranks), self.stages_per_rank, self.num_micro_batches * more)
        parts = [each / more for each in forward_s], [each / more for each in backward_s]
        return step_time(orders, *parts, [0.0] * (len(forward_s) - 1))

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


def _even(seconds: Sequence[float]) -> list[float]:
    return [sum(seconds) / len(seconds)] * len(seconds)
