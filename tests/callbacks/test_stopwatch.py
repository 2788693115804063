"""Laps of a stopwatch, on a clock that the test moves."""

from __future__ import annotations

import torch

from lightning_multigpu.callbacks.throughput import Stopwatch
from lightning_multigpu.communication.metering.clocks import HostClock, StreamClock, clock_of
from tests.callbacks.training import HandClock


class EventTimeline:
    """Like a GPU's: a point's time is known only when the device has got there."""

    def __init__(self) -> None:
        self.reached_s = 0.0
        self.now_s = 0.0
        self.waited_for: list[float] = []

    def mark(self) -> float:
        return self.now_s

    def passed(self, mark: float) -> bool:
        return mark <= self.reached_s

    def wait(self, mark: float) -> None:
        self.waited_for.append(mark)
        self.reached_s = max(self.reached_s, mark)

    def seconds(self, start: float, end: float) -> float:
        assert self.passed(end)
        return end - start


def test_laps_follow_each_other_without_gaps_and_leave_pauses_out() -> None:
    clock = HandClock()
    stopwatch = Stopwatch(HostClock(clock))
    laps = []
    for seconds, act in (
        (9, stopwatch.start),
        (2, stopwatch.lap),
        (3, stopwatch.lap),
        (1, stopwatch.pause),
        (50, stopwatch.pause),
        (50, stopwatch.start),
        (2, stopwatch.start),
        (4, stopwatch.lap),
        (1, stopwatch.pause),
        (10, stopwatch.lap),
        (10, stopwatch.lap),
    ):
        clock.now_s += seconds
        laps.append(act())
    done = [lap for lap in laps if lap is not None]
    assert [lap.seconds for lap in done] == [2, 3, 1 + 2 + 4, 1, 0]
    assert done[0].ready()


def test_a_device_behind_the_host_is_not_waited_for_until_asked() -> None:
    timeline = EventTimeline()
    stopwatch = Stopwatch(timeline)
    stopwatch.start()
    timeline.now_s = 5.0
    lap = stopwatch.lap()
    assert not lap.ready()
    assert timeline.waited_for == []
    lap.wait()
    assert lap.ready()
    assert lap.seconds == 5.0


def test_each_device_has_its_timeline() -> None:
    assert isinstance(clock_of(torch.device("cpu")), HostClock)
    assert isinstance(clock_of(torch.device("cuda", 0)), StreamClock)
