"""Recorder: the timeline of a pipeline's rank while it trains."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_multigpu.communication.metering.clocks import Clock, HostClock, StreamClock
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.planning.pipelines.timeline import Interval, StepTimeline

KEPT_STEPS = 9
_GPU_STRIDE = 16
"""On a GPU one in 16 steps is timed, since the host waits for the device as a timed step begins."""

_Mark = tuple[str, int, int, Any]
"""Kind, stage and micro-batch of the work that begins at this mark, and the clock's mark."""


class Recorder:
    """Records the newest steps of a rank as marks; each mark names the work that begins there::

        receive   forward       idle send  receive    backward     idle
        |---------|-------------|----|-----|----------|------------|

    It records steps whose micro-batches run in one schedule, if ``notes_steps`` is set; the first batch of a shape does
    not. The meter gives the time.
    """

    def __init__(self, meter: Meter, device: torch.device) -> None:
        self.notes_steps = False
        on_gpu = device.type == "cuda"
        self._clock: Clock = StreamClock(meter.now, device) if on_gpu else HostClock(meter.now)
        self._stride = _GPU_STRIDE if on_gpu else 1
        self._steps: deque[tuple[int, int, tuple[Any, float], list[_Mark]]] = deque(maxlen=KEPT_STEPS)
        self._marks: list[_Mark] | None = None
        self._number = 0

    @contextmanager
    def step(self, num_micro_batches: int, *, together: bool) -> Iterator[None]:
        """Records the step within the block, unless it fails.

        With ``together`` all its micro-batches run in one schedule.
        """
        self._number += 1
        if not (together and self.notes_steps) or self._number % self._stride:
            yield
            return
        origin = self._clock.origin()
        self._marks = marks = []
        try:
            yield
        finally:
            self._marks = None
        marks.append(("end", -1, -1, self._clock.mark()))
        self._steps.append((self._number, num_micro_batches, origin, marks))

    def enter(self, kind: str, stage: int, micro_batch: int, *, received: bool = False) -> None:
        """Marks the beginning of a piece of work; if ``received``, the wait for its message since the last mark too."""
        marks = self._marks
        if marks is None:
            return
        if received and marks:
            marks[-1] = ("receive", stage, micro_batch, marks[-1][-1])
        marks.append((kind, stage, micro_batch, self._clock.mark()))

    def steps(self) -> tuple[StepTimeline, ...]:
        """The newest steps that were timed; waits for their events on a GPU."""
        found = []
        for number, count, (origin, origin_s), marks in self._steps:
            self._clock.wait(marks[-1][-1])
            seconds = [origin_s + self._clock.seconds(origin, at) for *_, at in marks]
            timeline = tuple(
                Interval(kind, stage, micro_batch, start_s, end_s)
                for (kind, stage, micro_batch, _), start_s, end_s in zip(marks, seconds, seconds[1:], strict=False)
                if kind != "idle"
            )
            found.append(StepTimeline(number, count, timeline))
        return tuple(found)
