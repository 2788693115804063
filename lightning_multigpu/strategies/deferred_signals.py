"""Holds signals back until all ranks have come to the same batch.

A scheduler signals each rank wherever it is. Lightning's handlers save a checkpoint or tell the other ranks, which are
collectives: run at once, one rank would wait in its handler while another waits for it in the exchange of gradients.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class DeferredSignals:
    """Replaces the handlers of signals by one that takes note of them.

    Args:
        signals: those to hold back; each has a bit of its own, in this order.

    Attributes:
        received: bits of the signals that this process has received.
        due: bits of those that some process of the job has received, and all of them know of.
    """

    def __init__(self, signals: list[signal.Signals]) -> None:
        self.received = 0
        self.due = 0
        self._signals = signals
        self._handlers: dict[signal.Signals, Any] = {}

    def hold(self) -> None:
        """Takes the signals over from their present handlers; only the main thread can, elsewhere nothing happens."""
        if threading.current_thread() is threading.main_thread():
            for signum in self._signals:
                self._handlers[signum] = signal.signal(signum, self._note)

    def act(self) -> None:
        """Calls the handlers that were replaced, for all signals that are due."""
        due, self.due = self.due, 0
        self.received &= ~due
        for bit, signum in enumerate(self._signals):
            if due & 1 << bit and callable(self._handlers.get(signum)):
                self._handlers[signum](signum, None)

    def release(self) -> None:
        """Gives the signals back to their handlers; what has been received and not been acted on is handled now."""
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self.due = self.received
        self.act()
        self._handlers.clear()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received |= 1 << self._signals.index(signal.Signals(signum))
