"""A stopwatch for optimizer steps that can be paused, and that on a GPU never waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Timeline(Protocol):
    """Where time is read: points are made by :meth:`mark` and are opaque to everyone else."""

    def mark(self) -> Any:
        """The present point."""
        ...

    def passed(self, mark: Any) -> bool:
        """Whether the time of the point is known by now."""
        ...

    def wait(self, mark: Any) -> None:
        """Returns when the time of the point is known."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """From one point to another, both passed."""
        ...


class HostTimeline:
    """The host's clock: for devices on which an operation has ended when its call returns."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def mark(self) -> float:
        return self._clock()

    def passed(self, mark: float) -> bool:
        return True

    def wait(self, mark: float) -> None:
        return None

    def seconds(self, start: float, end: float) -> float:
        return end - start


class CudaTimeline:
    """Events on the current stream: the host runs ahead of a GPU, so its own clock would time the queueing only."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3


def timeline_of(device: torch.device) -> Timeline:
    """The timeline on which a device's work is timed."""
    return CudaTimeline() if device.type == "cuda" else HostTimeline()


@dataclass(frozen=True)
class Lap:
    """The time between two optimizer steps, pauses left out; its length may be known only later."""

    timeline: Timeline
    spans: tuple[tuple[Any, Any], ...]

    def ready(self) -> bool:
        return all(self.timeline.passed(end) for _, end in self.spans)

    def wait(self) -> None:
        for _, end in self.spans:
            self.timeline.wait(end)

    @property
    def seconds(self) -> float:
        return sum(self.timeline.seconds(start, end) for start, end in self.spans)


class Stopwatch:
    """Cuts running time into laps::

    start          lap           pause     start        lap
      |------------->|-------------|.........|------------>|
      <---- lap 1 --->              (not timed)
                      <--- lap 2, first part> <-- second -->
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._started: Any | None = None
        self._spans: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Goes on after a pause; a stopwatch that runs is left as it is."""
        if self._started is None:
            self._started = self._timeline.mark()

    def pause(self) -> None:
        """Stops the time until :meth:`start`; a stopwatch that stands is left as it is."""
        if self._started is not None:
            self._spans.append((self._started, self._timeline.mark()))
            self._started = None

    def lap(self) -> Lap:
        """Ends the present lap and, if the stopwatch runs, begins the next one."""
        if self._started is not None:
            now = self._timeline.mark()
            self._spans.append((self._started, now))
            self._started = now
        lap = Lap(self._timeline, tuple(self._spans))
        self._spans = []
        return lap
