"""The predicted order of work is that of torch's schedules, and takes the time that the papers give."""

from collections import Counter
from typing import Any

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble, ScheduleLoopedBFS

from lightning_multigpu.planning.pipelines.schedule_order import Work, in_flight, schedule_orders, step_time

KINDS = {"FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "backward", "BACKWARD_WEIGHT": "weight"}


def torchs(cls: Any, rank: int, num_ranks: int, stages_per_rank: int, num_micro_batches: int) -> list[Work]:
    """The order of one rank as torch's schedule calculates it, which needs neither stages nor processes."""
    schedule = cls.__new__(cls)
    schedule.pp_group_size, schedule.n_local_stages = num_ranks, stages_per_rank
    schedule._n_microbatches, schedule._stages = num_micro_batches, [None] * stages_per_rank
    schedule.number_of_rounds = max(1, num_micro_batches // num_ranks)
    schedule.microbatches_per_round = num_micro_batches // schedule.number_of_rounds
    actions = schedule._calculate_single_rank_operations(rank)
    return [
        Work(KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)  # type: ignore[arg-type]
        for action in actions
        if action is not None
    ]


@pytest.mark.parametrize(
    ("schedule", "cls", "num_micro_batches"),
    [
        ("interleaved", ScheduleInterleaved1F1B, 8),
        ("zero_bubble", ScheduleInterleavedZeroBubble, 12),
        ("interleaved", ScheduleInterleaved1F1B, 4),
        ("interleaved", ScheduleLoopedBFS, 3),
        ("zero_bubble", ScheduleLoopedBFS, 9),
    ],
)
def test_orders_are_those_of_torch(schedule: str, cls: Any, num_micro_batches: int) -> None:
    orders = schedule_orders(schedule, 4, 2, num_micro_batches)
    assert orders == [torchs(cls, rank, 4, 2, num_micro_batches) for rank in range(4)]


@pytest.mark.parametrize(("schedule", "stages"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zero_bubble", 2)])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 8, 13])
def test_everything_is_done_once(schedule: str, stages: int, num_micro_batches: int) -> None:
    orders = schedule_orders(schedule, 3, stages, num_micro_batches)
    for rank, order in enumerate(orders):
        kinds = {work.kind for work in order}
        assert {"forward", "backward"} <= kinds
        wanted = {(k, rank + 3 * s, m) for k in kinds for s in range(stages) for m in range(num_micro_batches)}
        assert Counter((w.kind, w.stage, w.micro_batch) for w in order) == Counter(wanted)


def test_the_slowest_stage_and_its_transfers_make_the_step() -> None:
    orders = schedule_orders("gpipe", 2, 1, 3)
    # Rank 1 waits for a forward pass and its transfer, runs three, and sends a gradient; then rank 0 runs three back.
    assert step_time(orders, [1.0, 4.0], [2.0, 1.0], [0.5]) == (1 + 0.5) + 3 * 4 + (1 + 0.5) + 3 * 2


def test_micro_batches_in_memory() -> None:
    assert [in_flight(order) for order in schedule_orders("gpipe", 2, 1, 5)] == [{0: 5}, {1: 5}]
    assert [in_flight(order) for order in schedule_orders("1f1b", 3, 1, 5)] == [{0: 3}, {1: 2}, {2: 1}]
    assert [in_flight(order) for order in schedule_orders("1f1b", 3, 1, 2)] == [{0: 2}, {1: 2}, {2: 2}]
    # Warm-up of (v - 1) P + 2 (P - 1 - p) passes, and one more: Narayanan et al. 2021, figure 4.
    assert [in_flight(order) for order in schedule_orders("interleaved", 2, 2, 4)] == [{0: 3, 2: 2}, {1: 2, 3: 1}]
    # Where a micro-batch takes more on one of the stages, the rank is fullest at another time.
    _, last = schedule_orders("interleaved", 2, 2, 4)
    assert in_flight(last, {1: 10, 3: 1}) == {1: 3, 3: 0}
    assert in_flight(last, {1: 1, 3: 10}) == {1: 2, 3: 1}
