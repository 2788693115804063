"""Recorder of the actions that Lightning reports to its profiler."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch.profilers import Profiler
from typing_extensions import override

from lightning_multigpu.planning.step_phases import Span


class ActionRecorder(Profiler):
    """Records actions as spans, and passes them on to the profiler whose place it takes.

    Args:
        inner: the Trainer's profiler.
        clock: seconds, monotonic.
    """

    def __init__(self, inner: Profiler, clock: Callable[[], float]) -> None:
        super().__init__()
        self.inner = inner
        self.spans: list[Span] = []
        """Actions that have ended, in the order of their ends."""
        self._clock = clock
        self._open: list[tuple[str, float]] = []

    @override
    def start(self, action_name: str) -> None:
        self.inner.start(action_name)
        self._open.append((action_name, self._clock()))

    @override
    def stop(self, action_name: str) -> None:
        now_s = self._clock()
        for index in reversed(range(len(self._open))):
            if self._open[index][0] == action_name:
                self.spans.append(Span(self._open.pop(index)[1], now_s, action_name))
                break
        self.inner.stop(action_name)
