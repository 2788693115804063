"""A stopwatch for optimizer steps, which can be paused and never waits for a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_multigpu.communication.metering.clocks import Clock


@dataclass(frozen=True)
class Lap:
    """The time between two optimizer steps without the pauses; on a GPU its length may be known only later."""

    clock: Clock
    spans: tuple[tuple[Any, Any], ...]

    def ready(self) -> bool:
        return all(self.clock.passed(end) for _, end in self.spans)

    def wait(self) -> None:
        for _, end in self.spans:
            self.clock.wait(end)

    @property
    def seconds(self) -> float:
        return sum(self.clock.seconds(start, end) for start, end in self.spans)


class Stopwatch:
    """Cuts running time into laps::

    start          lap           pause     start        lap
      |------------->|-------------|.........|------------>|
      <---- lap 1 --->              (not timed)
                      <--- lap 2, first part> <-- second -->
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started: Any | None = None
        self._spans: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Goes on after a pause; does nothing while the stopwatch runs."""
        if self._started is None:
            self._started = self._clock.mark()

    def pause(self) -> None:
        """Stops until :meth:`start`; does nothing while the stopwatch stands."""
        if self._started is not None:
            self._spans.append((self._started, self._clock.mark()))
            self._started = None

    def lap(self) -> Lap:
        """Ends the present lap and, if the stopwatch runs, begins the next one."""
        if self._started is not None:
            now = self._clock.mark()
            self._spans.append((self._started, now))
            self._started = now
        lap = Lap(self._clock, tuple(self._spans))
        self._spans = []
        return lap
