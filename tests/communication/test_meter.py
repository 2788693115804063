"""The meter with a clock that the test moves: every figure is known exactly."""

import pickle
import threading

import pytest

from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.metering.traffic import sent_share
from tests.callbacks.training import HandClock


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def meter(clock: HandClock) -> Meter:
    return Meter(clock=clock)


def test_all_reduce_factor_is_the_formula() -> None:
    assert [sent_share("all_reduce", n) for n in (1, 2, 4, 8)] == [0.0, 1.0, 1.5, 1.75]
    assert sent_share("all_gather", 4) == 0.75


@pytest.mark.parametrize(
    ("operation", "group_size", "word"), [("dance", 2, "dance"), ("all_reduce", 0, "group_size=0")]
)
def test_unknown_operations_and_sizes_are_named(operation: str, group_size: int, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        sent_share(operation, group_size)


def test_hidden_and_exposed_parts(meter: Meter, clock: HandClock) -> None:
    """Buckets travel from 1 to 4 and from 5 to 9; the main thread waits from 7 on: 2 of 7 seconds are exposed."""
    clock.now_s = 1.0
    first = meter.begin("all_reduce", group="data", group_size=2, size_bytes=100)
    clock.now_s = 4.0
    first.finish()
    clock.now_s = 5.0
    second = meter.begin("all_reduce", group="data", group_size=2, size_bytes=60, sent_bytes=64)
    clock.now_s = 9.0
    second.finish()
    meter.waited(7.0, 9.5)
    clock.now_s = 10.0
    meter.end_step()

    (step,) = meter.steps
    (totals,) = step.operations
    assert (step.start_s, step.end_s, step.index) == (0.0, 10.0, 0)
    assert (totals.count, totals.size_bytes, totals.sent_bytes) == (2, 160, 164)
    assert (totals.total_s, totals.exposed_s, totals.hidden_s) == (7.0, 2.0, 5.0)
    assert (step.total_s, step.exposed_s, step.hidden_s, step.sent_bytes) == (7.0, 2.0, 5.0, 164)


def test_overlapping_transfers_are_not_counted_twice(meter: Meter, clock: HandClock) -> None:
    both = [meter.begin("all_reduce", group=name, group_size=2, size_bytes=1) for name in ("data", "metrics")]
    clock.now_s = 3.0
    for transfer in both:
        transfer.finish()
    meter.end_step()
    step = meter.steps[0]
    assert step.total_s == 3.0
    assert [totals.total_s for totals in step.operations] == [3.0, 3.0]
    assert len(step.of("all_reduce")) == 2
    assert len(step.of("all_reduce", "data")) == 1


def test_a_step_waits_for_its_transfers(meter: Meter, clock: HandClock) -> None:
    late = meter.begin("all_gather", group="control", group_size=2, size_bytes=4)
    meter.end_step()
    meter.end_step()
    assert meter.steps_ended == 2
    assert not meter.steps
    clock.now_s = 1.0
    late.finish()
    meter.end_step()
    assert [step.index for step in meter.steps] == [0, 1, 2]


def test_flush_waits_for_a_thread_that_reports_the_end_late_and_leaves_out_what_nobody_waits_for(meter: Meter) -> None:
    meter.begin("all_gather", group="control", group_size=2, size_bytes=4)
    meter.end_step()
    meter.flush()
    assert [step.operations for step in meter.steps] == [()]
    transfer = meter.begin("reduce", group="shards", group_size=2, size_bytes=4)
    meter.end_step()
    thread = threading.Timer(0.02, transfer.finish)
    thread.start()
    meter.flush()
    thread.join()
    assert [totals.operation for totals in meter.steps[1].operations] == ["reduce"]


def test_discarded_traffic_belongs_to_no_step(meter: Meter, clock: HandClock) -> None:
    meter.begin("barrier", group="world", group_size=2, size_bytes=0).finish()
    clock.now_s = 5.0
    meter.discard()
    clock.now_s = 6.0
    meter.end_step()
    assert meter.steps[0].operations == ()
    assert meter.steps[0].start_s == 5.0


def test_a_spawned_rank_starts_with_an_empty_meter(meter: Meter) -> None:
    meter.end_step()
    assert not pickle.loads(pickle.dumps(meter)).steps
