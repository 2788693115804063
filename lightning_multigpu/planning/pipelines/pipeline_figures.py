"""The measured step of a pipeline, and predictions of it with more micro-batches or equal stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_multigpu.planning.pipelines.schedule_order import schedule_orders, step_time
from lightning_multigpu.planning.pipelines.timeline import BUSY, Timeline, bubble, usage

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

    @classmethod
    def of(
        cls, timelines: Mapping[int, Timeline], schedule: str, stages_per_rank: int, num_micro_batches: int
    ) -> PipelineFigures:
        """The figures of a step whose timelines are on one clock.

        A micro-batch of half the size is assumed to take half of the time. The rest of the measured time, messages
        and the overhead of passes, is assumed to stay.

        Args:
            timelines: rank -> timeline, in the order of the stages.
            schedule, stages_per_rank, num_micro_batches: as in :func:`.schedule_order.schedule_orders`.
        """
        ranks = len(timelines)
        in_order = list(timelines.values())
        forward_s, backward_s = _pass_seconds(in_order, ranks * stages_per_rank, num_micro_batches)
        measured = usage(in_order)
        wall_s = measured[0].wall_s

        def wall(forward_s: Sequence[float], backward_s: Sequence[float], more: int) -> float:
            orders = schedule_orders(schedule, ranks, stages_per_rank, num_micro_batches * more)
            parts = [seconds / more for seconds in forward_s], [seconds / more for seconds in backward_s]
            return step_time(orders, *parts, [0.0] * (len(forward_s) - 1))

        as_it_is_s = wall(forward_s, backward_s, 1)
        more = (
            2 if wall(forward_s, backward_s, 2) - wall(forward_s, backward_s, 4) < _WORTH_DOUBLING * as_it_is_s else 4
        )
        return cls(
            wall_s=wall_s,
            bubble=bubble(in_order),
            num_micro_batches=num_micro_batches,
            more_micro_batches=more * num_micro_batches,
            with_more_s=wall_s - as_it_is_s + wall(forward_s, backward_s, more),
            balanced_s=wall_s - as_it_is_s + wall(_even(forward_s), _even(backward_s), 1),
            passes_s=as_it_is_s,
            busy_s={
                rank: sum(used.seconds[kind] for kind in BUSY) for rank, used in zip(timelines, measured, strict=True)
            },
        )


def _even(seconds: Sequence[float]) -> list[float]:
    return [sum(seconds) / len(seconds)] * len(seconds)


def _pass_seconds(
    timelines: Sequence[Timeline], num_stages: int, num_micro_batches: int
) -> tuple[list[float], list[float]]:
    """Each stage's mean seconds for a micro-batch, forward and backward; backward includes weight passes."""
    forward_s, backward_s = [0.0] * num_stages, [0.0] * num_stages
    for timeline in timelines:
        for interval in timeline:
            if interval.kind == "forward":
                forward_s[interval.stage] += interval.seconds / num_micro_batches
            elif interval.kind in BUSY:
                backward_s[interval.stage] += interval.seconds / num_micro_batches
    return forward_s, backward_s
