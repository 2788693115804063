"""Laps of a stopwatch, on a clock that the test moves."""

from __future__ import annotations

import torch

from lightning_multigpu.callbacks.stopwatch import Stopwatch
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


def test_laps_follow_each_other_without_gaps() -> None:
    clock = HandClock()
    stopwatch = Stopwatch(HostClock(clock))
    stopwatch.start()
    clock.now_s += 2
    first = stopwatch.lap()
    clock.now_s += 3
    second = stopwatch.lap()
    assert (first.seconds, second.seconds) == (2.0, 3.0)
    assert first.ready()


def test_a_pause_is_left_out_of_the_lap_it_falls_into() -> None:
    clock = HandClock()
    stopwatch = Stopwatch(HostClock(clock))
    stopwatch.start()
    clock.now_s += 1
    stopwatch.pause()
    clock.now_s += 50
    stopwatch.pause()
    clock.now_s += 50
    stopwatch.start()
    clock.now_s += 2
    stopwatch.start()
    clock.now_s += 4
    assert stopwatch.lap().seconds == 7.0


def test_a_lap_that_ends_in_a_pause_has_what_ran_before_it() -> None:
    clock = HandClock()
    stopwatch = Stopwatch(HostClock(clock))
    stopwatch.start()
    clock.now_s += 1
    stopwatch.pause()
    clock.now_s += 10
    assert stopwatch.lap().seconds == 1.0
    assert stopwatch.lap().seconds == 0.0


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
