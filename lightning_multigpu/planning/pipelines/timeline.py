"""Measured and theoretical timelines of the ranks of a pipeline in a step.

::

    wall     |<------------------------------>|     from the first pass of any rank to the last
    rank 0   .. F0 F1 F2 .. .. .. B0 B1 B2          busy: forward, backward and weight passes
    rank 1   F0 F1 F2 .. .. .. .. .. B0 B1 B2       bubble: 1 - busy / wall
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from lightning_multigpu.planning.numbers import size
from lightning_multigpu.planning.pipelines.schedule_order import schedule_orders, work_times

BUSY = ("forward", "backward", "weight")
WAITING = ("send", "receive")


@dataclass(frozen=True)
class Interval:
    """A rank's activity from ``start_s`` to ``end_s``; between its intervals a rank is idle.

    ``kind`` is "forward", "backward" or, if the gradients of the weights are computed separately, "weight": a pass of a
    stage over a micro-batch. "send": the rank gives a message to the back end, or waits until the back end has sent it.
    "receive": the rank waits for a message of a pass. The wait splits a forward pass in two if the step computes
    something before the stage's layers.
    """

    kind: str
    stage: int
    micro_batch: int
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


Timeline = tuple[Interval, ...]
"""The intervals of one rank in one step, in order."""


@dataclass(frozen=True)
class StepTimeline:
    """A rank's timeline in one step; ``number`` is the same on all ranks of the pipeline."""

    number: int
    num_micro_batches: int
    timeline: Timeline


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of a rank's parameters, gradients and optimizer states."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int

    @property
    def total(self) -> int:
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def kinds(self) -> str:
        """The bytes by kind, as text."""
        return (
            f"parameters {size(self.parameters_bytes)}, gradients {size(self.gradients_bytes)}, "
            f"optimizer {size(self.optimizer_bytes)}"
        )


NOTHING = HeldBytes(0, 0, 0)


def summed(several: Iterable[HeldBytes]) -> HeldBytes:
    """The bytes of all, by kind."""
    return HeldBytes(*(sum(kind) for kind in zip(*(vars(one).values() for one in [NOTHING, *several]), strict=True)))


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """The newest steps of one rank of a pipeline.

    Attributes:
        pipeline: number of the pipeline.
        position: the rank's position in the pipeline: it has the stages position, position + num_ranks...
        num_ranks: ranks of the pipeline, P.
        stages_per_rank: stages of each rank, v.
        steps: the newest timed steps, in order.
    """

    pipeline: int
    position: int
    num_ranks: int
    stages_per_rank: int
    schedule: str
    steps: tuple[StepTimeline, ...]


@dataclass(frozen=True)
class Usage:
    """A rank's use of the time from the pipeline's first pass to its last.

    Attributes:
        wall_s: seconds from the pipeline's first pass to its last; the same on all ranks.
        seconds: kind of interval -> seconds within that time.
    """

    wall_s: float
    seconds: dict[str, float]

    @property
    def bubble(self) -> float:
        """1 - busy / wall."""
        return 1 - sum(self.seconds[kind] for kind in BUSY) / self.wall_s

    @property
    def idle_s(self) -> float:
        """Seconds in which the rank is not busy, sends nothing and does not wait in a receive."""
        return self.wall_s - sum(self.seconds.values())


def usage(timelines: Sequence[Timeline]) -> list[Usage]:
    """The usage of each rank of a pipeline; the timelines are of the same step and on the same clock.

    Raises:
        ValueError: no rank has a pass.
    """
    start_s, end_s = span(timelines)
    return [
        Usage(
            end_s - start_s,
            {
                kind: sum(
                    max(0.0, min(end_s, i.end_s) - max(start_s, i.start_s)) for i in timeline if i.kind == kind
                )
                for kind in (*BUSY, *WAITING)
            },
        )
        for timeline in timelines
    ]  # fmt: skip


def span(timelines: Sequence[Timeline]) -> tuple[float, float]:
    """The start of the first pass of any rank, and the end of the last pass.

    Raises:
        ValueError: no rank has a pass.
    """
    passes = [interval for timeline in timelines for interval in timeline if interval.kind in BUSY]
    if not passes:
        raise ValueError("the timelines have no forward, backward or weight pass: pass those of a step that was run")
    return min(interval.start_s for interval in passes), max(interval.end_s for interval in passes)


def bubble(timelines: Sequence[Timeline]) -> float:
    """The share of the ranks' time, from the first pass to the last, in which they are not busy."""
    return sum(rank.bubble for rank in usage(timelines)) / len(timelines)


def theoretical(
    schedule: str, num_ranks: int, stages_per_rank: int, num_micro_batches: int, unit_s: float = 1.0
) -> list[Timeline]:
    """The timelines of equal stages whose messages take no time.

    A forward pass takes one unit and a backward pass two; with weight passes each of the three takes one unit. With P
    ranks, v stages on each and M micro-batches the bubble is (P-1)/(M+P-1) under "gpipe" and "1f1b", and (P-1)/(vM+P-1)
    under "interleaved", as in the papers that :mod:`.schedule_order` names, for any ratio of backward to forward.

    Args:
        schedule, num_ranks, stages_per_rank, num_micro_batches: as in :func:`.schedule_order.schedule_orders`.
        unit_s: seconds of a forward pass.
    """
    orders = schedule_orders(schedule, num_ranks, stages_per_rank, num_micro_batches)
    stages = num_ranks * stages_per_rank
    times = work_times(orders, [unit_s] * stages, [2 * unit_s] * stages, [0.0] * (stages - 1))
    return [tuple(Interval(w.kind, w.stage, w.micro_batch, *times[w]) for w in order) for order in orders]


def median_step(steps: Sequence[Sequence[StepTimeline]], hosts: Sequence[int]) -> list[StepTimeline]:
    """Each rank's timeline of the step with the median wall time, on the clock of the first rank.

    Only steps with the most micro-batches count, and only if all ranks have recorded them.

    Args:
        steps: each rank's steps, in the order of positions.
        hosts: each rank's host number; ranks of one host share a clock.

    Returns:
        One step for each rank; an empty list if the ranks have no step in common.
    """
    by_number = [{step.number: step for step in of_rank} for of_rank in steps]
    common = [number for number in by_number[0] if all(number in of_rank for of_rank in by_number)]
    most = max((by_number[0][number].num_micro_batches for number in common), default=0)
    walls: dict[int, float] = {}
    found: dict[int, list[StepTimeline]] = {}
    for number in common:
        step = [of_rank[number] for of_rank in by_number]
        if step[0].num_micro_batches == most:
            moved = aligned([part.timeline for part in step], hosts)
            start_s, end_s = span(moved)
            walls[number] = end_s - start_s
            found[number] = [replace(part, timeline=timeline) for part, timeline in zip(step, moved, strict=True)]
    if not walls:
        return []
    middle = median_low(walls.values())
    return next(found[number] for number in walls if walls[number] == middle)


def aligned(timelines: Sequence[Timeline], hosts: Sequence[int]) -> list[Timeline]:
    """The timelines on the clock of the first rank.

    Ranks of one host share a clock. Between hosts, no message is received before it is sent: activations bound the
    difference of two clocks from above, and gradients from below. The result is the middle, with an error of at most
    half of the fastest round trip (Cristian 1989, "Probabilistic clock synchronization", section 4).
    """
    moved = [timelines[0]]
    ahead_s = 0.0
    for position in range(1, len(timelines)):
        if hosts[position] != hosts[position - 1]:
            ahead_s += _clock_ahead_s(timelines[position - 1], timelines[position])
        moved.append(
            tuple(replace(i, start_s=i.start_s - ahead_s, end_s=i.end_s - ahead_s) for i in timelines[position])
        )
    return moved


def _clock_ahead_s(before: Timeline, after: Timeline) -> float:
    """The seconds by which the clock of the rank with the later stages is ahead."""
    passes = {(i.kind, i.stage, i.micro_batch): i for i in after}
    at_most = []
    at_least = []
    for interval in before:
        neighbour = passes.get((interval.kind, interval.stage + 1, interval.micro_batch))
        if neighbour is not None and interval.kind == "forward":
            at_most.append(neighbour.start_s - interval.end_s)
        elif neighbour is not None and interval.kind == "backward":
            at_least.append(neighbour.end_s - interval.start_s)
    if not at_most:
        return 0.0
    return (min(at_most) + max(at_least)) / 2 if at_least else min(at_most)
