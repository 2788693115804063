"""Holds a signal back until all ranks have come to the same point."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class DeferredSignal:
    """Replaces the handler of a signal by one that only takes note of it.

    Attributes:
        pending: this process has received the signal.
        due: some process of the job has, and all of them know.
    """

    def __init__(self, signum: signal.Signals) -> None:
        self.signum = signum
        self.pending = False
        self.due = False
        self._handler: Any = None
        self._held = False

    def hold(self) -> None:
        """Takes the signal over from its present handler; only the main thread can, elsewhere nothing happens."""
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(self.signum, self._note)
            self._held = True

    def act(self) -> None:
        """Calls the handler that was replaced."""
        self.pending = self.due = False
        if callable(self._handler):
            self._handler(self.signum, None)

    def release(self) -> None:
        """Gives the signal back to its handler."""
        if self._held:
            signal.signal(self.signum, self._handler)
            self._held = False

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.pending = True
