"""Schedule order: the passes of every rank of a pipeline, in order. Predictions of time and memory use it.

::

    gpipe, P = 2, M = 3               1f1b
    rank 0   F0 F1 F2 .. B0 B1 B2     F0 F1 .. B0 F2 B1 .. B2
    rank 1   .. F0 F1 F2 B0 B1 B2 ..  .. F0 B0 F1 B1 F2 B2 ..

The orders equal those of torch's schedules, which run over NCCL; over Gloo this package runs the orders itself.
Sources: GPipe (Huang et al. 2019, arXiv:1811.06965); 1F1B and interleaved 1F1B (Narayanan et al. 2021,
    arXiv:2104.04473); ZB1P
(Qi et al. 2023, arXiv:2401.10241); breadth first (Lamy-Poirier 2022, arXiv:2211.05953).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

Kind = Literal["forward", "backward", "weight"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
ExecutedSchedule = Literal["gpipe", "breadth_first", "1f1b", "interleaved", "zero_bubble"]

SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "zero_bubble")
LOOPED_SCHEDULES: tuple[ScheduleName, ...] = ("interleaved", "zero_bubble")
"""The schedules with several stages on each rank."""


@dataclass(frozen=True)
class Work:
    """A stage's pass over a micro-batch.

    "weight" is the part of the backward pass that no other stage waits for, if a schedule separates it.
    """

    kind: Kind
    stage: int
    micro_batch: int


def executed_schedule(schedule: str, num_ranks: int, num_micro_batches: int) -> ExecutedSchedule:
    """The order that runs under a schedule; arguments as for :func:`schedule_orders`.

    If there are too few micro-batches for the schedule, or no multiple of the number that it needs, all forward passes
    run before all backward passes, with equal results.
    """
    rounds = max(1, num_micro_batches // num_ranks)
    if schedule == "interleaved" or schedule == "zero_bubble":
        full = num_micro_batches >= num_ranks and num_micro_batches % rounds == 0
        return schedule if full else "breadth_first"  # type: ignore[return-value]
    return "1f1b" if schedule == "1f1b" and num_micro_batches >= num_ranks else "gpipe"


@cache
def schedule_orders(
    schedule: str, num_ranks: int, stages_per_rank: int, num_micro_batches: int
) -> Sequence[Sequence[Work]]:
    """The passes of each rank, in order.

    Args:
        schedule: "gpipe", "1f1b", "interleaved" or "zero_bubble"; see :func:`executed_schedule`.
        num_ranks: P; rank p has the stages p, P + p...
        stages_per_rank: v; 1 under "gpipe" and "1f1b".
        num_micro_batches: M.
    """
    executed = executed_schedule(schedule, num_ranks, num_micro_batches)
    ranks = range(num_ranks)
    if executed == "1f1b":
        return [_one_forward_one_backward(rank, num_ranks, num_micro_batches) for rank in ranks]
    if executed == "interleaved" or executed == "zero_bubble":
        apart = executed == "zero_bubble"
        return [_interleaved(rank, num_ranks, stages_per_rank, num_micro_batches, apart) for rank in ranks]
    return [_all_forward_first(rank, num_ranks, stages_per_rank, num_micro_batches) for rank in ranks]


def in_flight(order: Sequence[Work], size_bytes: Mapping[int, int] | None = None) -> dict[int, int]:
    """Stage -> micro-batches in memory, at the time when the rank has the most of them.

    With ``size_bytes``, the bytes of a micro-batch on each stage: at the time when they take the most memory.
    """
    now = {work.stage: 0 for work in order}
    peak = dict(now)

    def size(counts: Mapping[int, int]) -> int:
        return sum(count * (1 if size_bytes is None else size_bytes[stage]) for stage, count in counts.items())

    apart = any(work.kind == "weight" for work in order)
    for work in order:
        if work.kind == "forward":
            now[work.stage] += 1
            if size(now) > size(peak):
                peak = dict(now)
        elif work.kind == ("weight" if apart else "backward"):
            now[work.stage] -= 1
    return peak


def step_time(
    orders: Sequence[Sequence[Work]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: Sequence[float],
) -> float:
    """Seconds of a batch, forward and backward, without the optimizer; arguments as for :func:`work_times`."""
    return max(end_s for _, end_s in work_times(orders, forward_s, backward_s, transfer_s).values())


def work_times(
    orders: Sequence[Sequence[Work]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: Sequence[float],
) -> dict[Work, tuple[float, float]]:
    """The start and end of every pass of a batch, in seconds from the start of the first pass.

    Each rank runs its passes in order. A pass starts when its input has arrived, and ends when its output is sent.
    Weight passes are assumed to take half of the time of the backward pass.

    Args:
        orders: the passes of each rank, see :func:`schedule_orders`.
        forward_s, backward_s: each stage's seconds for a micro-batch.
        transfer_s: seconds of one message between two neighbouring stages; one fewer than stages.
    """
    apart = any(work.kind == "weight" for order in orders for work in order)
    share, last = 0.5 if apart else 1.0, len(forward_s) - 1

    def seconds(work: Work) -> float:
        if work.kind == "forward":
            return forward_s[work.stage] + (transfer_s[work.stage] if work.stage < last else 0.0)
        if work.kind == "weight":
            return backward_s[work.stage] * (1 - share)
        return backward_s[work.stage] * share + (transfer_s[work.stage - 1] if work.stage > 0 else 0.0)

    waiting, free_s = [list(reversed(order)) for order in orders], [0.0] * len(orders)
    times: dict[Work, tuple[float, float]] = {}
    while any(waiting):
        before = len(times)
        for rank, order in enumerate(waiting):
            while order and ((needed := _needed(order[-1], last)) is None or needed in times):
                work = order.pop()
                start_s = max(free_s[rank], 0.0 if needed is None else times[needed][1])
                free_s[rank] = start_s + seconds(work)
                times[work] = start_s, free_s[rank]
        assert len(times) > before, "the orders wait for each other"
    return times


def _needed(work: Work, last: int) -> Work | None:
    """The pass whose output ``work`` needs; ``last`` is the last stage."""
    stage, micro_batch = work.stage, work.micro_batch
    if work.kind == "forward":
        return Work("forward", stage - 1, micro_batch) if stage > 0 else None
    if work.kind == "weight":
        return Work("backward", stage, micro_batch)
    return Work("backward", stage + 1, micro_batch) if stage < last else Work("forward", stage, micro_batch)


def _all_forward_first(rank: int, num_ranks: int, stages_per_rank: int, num_micro_batches: int) -> list[Work]:
    stages = range(rank, num_ranks * stages_per_rank, num_ranks)
    batches = range(num_micro_batches)
    back = batches if stages_per_rank == 1 else batches[::-1]
    return [
        *(Work("forward", stage, micro_batch) for stage in stages for micro_batch in batches),
        *(Work("backward", stage, micro_batch) for stage in reversed(stages) for micro_batch in back),
    ]


def _one_forward_one_backward(rank: int, num_ranks: int, num_micro_batches: int) -> list[Work]:
    ahead = min(num_micro_batches, num_ranks - rank)
    order = [Work("forward", rank, micro_batch) for micro_batch in range(ahead)]
    for micro_batch in range(num_micro_batches):
        order.append(Work("backward", rank, micro_batch))
        if ahead + micro_batch < num_micro_batches:
            order.append(Work("forward", rank, ahead + micro_batch))
    return order


def _interleaved(
    rank: int, num_ranks: int, stages_per_rank: int, num_micro_batches: int, weights_apart: bool
) -> list[Work]:
    a_round = num_micro_batches // max(1, num_micro_batches // num_ranks)
    total = stages_per_rank * num_micro_batches
    hops = (1 if weights_apart else 2) * (num_ranks - 1 - rank)
    ahead = min((stages_per_rank - 1) * a_round + hops, total)

    def passes(kind: Kind) -> list[Work]:
        """All passes of a kind: a round of micro-batches runs through all stages of the rank before the next round."""
        count: dict[int, int] = {}
        found = []
        for number in range(total):
            local = (number // a_round) % stages_per_rank
            stage = (local if kind == "forward" else stages_per_rank - 1 - local) * num_ranks + rank
            found.append(Work(kind, stage, count.get(stage, 0)))
            count[stage] = count.get(stage, 0) + 1
        return found

    forward, backward, weight = passes("forward"), passes("backward"), passes("weight") if weights_apart else []
    order = forward[:ahead]
    done = 0
    for number in range(total):
        order += forward[ahead + number : ahead + number + 1]
        order.append(backward[number])
        if weights_apart and number >= rank:
            order.append(weight[done])
            done += 1
    return [*order, *weight[done:]]
