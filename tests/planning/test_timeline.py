"""Timelines made by hand give the figures that can be worked out by hand; those of theory, the papers' formulas."""

import pytest

from lightning_multigpu.planning.pipelines.timeline import (
    Interval,
    StepTimeline,
    Timeline,
    aligned,
    bubble,
    median_step,
    span,
    theoretical,
    usage,
)

# Two stages, two micro-batches, gpipe: rank 0 begins at 10 s and ends at 20 s, rank 1 works from 12 s to 18 s.
FIRST: Timeline = (
    Interval("forward", 0, 0, 10.0, 12.0),
    Interval("send", 0, 0, 12.0, 12.5),
    Interval("forward", 0, 1, 12.5, 14.0),
    Interval("send", 0, 1, 14.0, 14.5),
    Interval("receive", 0, 0, 14.5, 16.0),
    Interval("backward", 0, 0, 16.0, 17.5),
    Interval("receive", 0, 1, 17.5, 18.0),
    Interval("backward", 0, 1, 18.0, 20.0),
)
LAST: Timeline = (
    Interval("receive", 1, 0, 9.0, 12.0),
    Interval("forward", 1, 0, 12.0, 13.0),
    Interval("receive", 1, 1, 13.0, 14.0),
    Interval("forward", 1, 1, 14.0, 15.0),
    Interval("backward", 1, 0, 15.0, 16.0),
    Interval("backward", 1, 1, 16.5, 18.0),
    Interval("send", 1, 1, 18.0, 21.0),
)


def moved(timeline: Timeline, seconds: float) -> Timeline:
    return tuple(
        Interval(i.kind, i.stage, i.micro_batch, i.start_s + seconds, i.end_s + seconds) for i in timeline
    )  # fmt: skip


def test_a_step_lasts_from_its_first_pass_to_its_last() -> None:
    assert span([FIRST, LAST]) == (10.0, 20.0)


def test_each_rank_is_busy_waiting_or_idle_for_all_of_the_step() -> None:
    first, last = usage([FIRST, LAST])
    assert first.seconds == {"forward": 3.5, "backward": 3.5, "weight": 0.0, "send": 1.0, "receive": 2.0}
    assert first.idle_s == 0.0
    assert first.bubble == pytest.approx(0.3)
    # What rank 1 waited for before the step began, and sent after it had ended, is no part of it.
    assert last.seconds == {"forward": 2.0, "backward": 2.5, "weight": 0.0, "send": 2.0, "receive": 3.0}
    assert last.idle_s == 0.5
    assert last.bubble == pytest.approx(0.55)
    assert bubble([FIRST, LAST]) == pytest.approx((0.3 + 0.55) / 2)


def test_without_a_pass_there_is_no_step() -> None:
    with pytest.raises(ValueError, match="have no forward, backward or weight pass"):
        span([(Interval("receive", 0, 0, 1.0, 2.0),)])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(2, 4), (2, 8), (3, 8), (4, 16), (8, 8), (4, 1)])
def test_bubble_of_the_papers(schedule: str, num_ranks: int, num_micro_batches: int) -> None:
    expected = (num_ranks - 1) / (num_micro_batches + num_ranks - 1)
    timelines = theoretical(schedule, num_ranks, 1, num_micro_batches)
    assert bubble(timelines) == pytest.approx(expected)
    assert [rank.bubble for rank in usage(timelines)] == pytest.approx([expected] * num_ranks)


@pytest.mark.parametrize(
    ("num_ranks", "stages_per_rank", "num_micro_batches"), [(2, 2, 4), (2, 2, 8), (4, 2, 8), (4, 3, 16)]
)
def test_bubble_of_several_stages_a_rank(num_ranks: int, stages_per_rank: int, num_micro_batches: int) -> None:
    timelines = theoretical("interleaved", num_ranks, stages_per_rank, num_micro_batches)
    expected = (num_ranks - 1) / (stages_per_rank * num_micro_batches + num_ranks - 1)
    assert bubble(timelines) == pytest.approx(expected)


def test_zero_bubble_is_idle_for_less_and_has_its_weights_apart() -> None:
    timelines = theoretical("zero_bubble", 4, 2, 8)
    assert 0 < bubble(timelines) < bubble(theoretical("interleaved", 4, 2, 8))
    assert [rank.seconds["weight"] for rank in usage(timelines)] == [16.0] * 4
    assert {interval.seconds for timeline in timelines for interval in timeline} == {1.0}


@pytest.mark.parametrize("ahead_s", [0.0, 1e4, -3.0])
def test_clocks_of_two_hosts_are_told_apart_by_what_travels(ahead_s: float) -> None:
    # Activations leave room for 0 s, gradients too: the answer is exact.
    (first, last) = aligned([FIRST, moved(LAST, ahead_s)], hosts=[0, 1])
    assert first == FIRST
    assert [i.start_s for i in last] == pytest.approx([i.start_s for i in LAST])


def test_the_middle_is_taken_of_what_is_possible() -> None:
    before: Timeline = (Interval("forward", 0, 0, 0.0, 1.0), Interval("backward", 0, 0, 6.0, 7.0))
    behind: Timeline = (Interval("forward", 1, 0, 3.0, 4.0), Interval("backward", 1, 0, 4.0, 5.0))
    # Behind is ahead by at most 3 - 1 and at least 5 - 6.
    _, last = aligned([before, behind], hosts=[0, 1])
    assert last[0].start_s == 3.0 - 0.5
    assert aligned([before, behind], hosts=[1, 1]) == [before, behind]
    forward_only, _ = behind
    _, last = aligned([before, (forward_only,)], hosts=[0, 1])
    assert last[0].start_s == 1.0


def step(number: int, wall_s: float, num_micro_batches: int = 2, begin_s: float = 0.0) -> StepTimeline:
    return StepTimeline(number, num_micro_batches, (Interval("forward", 0, 0, begin_s, begin_s + wall_s),))


def test_the_step_of_median_wall_time_is_taken() -> None:
    ranks = [
        [step(1, 9.0), step(2, 1.0), step(3, 2.0), step(4, 5.0, 1), step(5, 3.0), step(6, 3.5, begin_s=1.0)],
        [step(2, 1.5), step(3, 7.0), step(4, 5.0, 1), step(5, 1.0), step(6, 1.0, begin_s=1.0)],
    ]
    # Walls of 1.5, 7, 3 and 3.5 s: of 4 the lower middle. Step 1 is one rank's only, step 4 of fewer micro-batches.
    assert [found.number for found in median_step(ranks, [0, 0])] == [5, 5]


def test_no_step_in_common() -> None:
    assert median_step([[step(1, 1.0)], [step(2, 1.0)]], [0, 0]) == []
    assert median_step([[], []], [0, 0]) == []
