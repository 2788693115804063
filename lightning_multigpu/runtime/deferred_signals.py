"""Deferred signals: they wait until all ranks have reached the same batch.

A scheduler, or a user, signals each rank at any place in its program. Lightning's handlers save a checkpoint or signal
the other ranks, which takes collectives: if they ran at once, one rank would wait in its handler while another waits
for its gradients.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_multigpu.guardian.interrupts import SAME_INTERRUPT_S


class DeferredSignals:
    """Replaces the handlers of signals by one that records them.

    A process that was forked meanwhile, such as a loader's worker, ignores them: its rank decides when it ends.

    Args:
        signals: the signals to defer; each has a bit, in this order.
        patience_s: how long SIGINT and SIGTERM wait for the other ranks; later they act on this rank only.
        on_interrupt: called at the first and the second SIGINT of this process, with the number.

    Attributes:
        received: bits of the signals that this process has received.
        due: bits of the signals that some process of the job has received, and all processes know.
        waits: whether ranks will agree on another batch. If not, SIGINT and SIGTERM act at once.
        agreed: bits of the signals that all ranks have acted on together.
    """

    def __init__(
        self,
        signals: list[signal.Signals],
        *,
        patience_s: float = float("inf"),
        on_interrupt: Callable[[int], None] | None = None,
    ) -> None:
        self.received = 0
        self.due = 0
        self.waits = True
        self.agreed = 0
        self._signals = signals
        self._patience_s = patience_s
        self._on_interrupt = on_interrupt
        self._handlers: dict[signal.Signals, Any] = {}
        self._first_s: dict[signal.Signals, float] = {}
        self._last_s: dict[signal.Signals, float] = {}
        self._interrupts = 0
        self._pushed: signal.Signals | None = None
        self._process = os.getpid()

    def hold(self, *only: signal.Signals) -> None:
        """Replaces the signals' handlers; only the main thread can, other threads do nothing.

        Args:
            only: the signals to defer; by default all.
        """
        if threading.current_thread() is threading.main_thread():
            for signum in only or self._signals:
                if signal.getsignal(signum) != self._note:
                    self._handlers[signum] = signal.signal(signum, self._note)

    def handler_before(self, signum: signal.Signals) -> Any:
        """The handler before the signal was deferred, or None if it is not deferred."""
        return self._handlers.get(signum)

    def act(self) -> None:
        """Calls the replaced handlers of all signals that are due; all ranks do so together."""
        due, self.due = self.due, 0
        self.received &= ~due
        self.agreed |= due
        for bit, signum in enumerate(self._signals):
            if due & 1 << bit and callable(self._handlers.get(signum)):
                self._handlers[signum](signum, None)

    def has_agreed(self, signum: signal.Signals) -> bool:
        """True if all ranks have acted on the signal together."""
        return signum in self._signals and bool(self.agreed & 1 << self._signals.index(signum))

    def follow(self, signum: signal.Signals) -> None:
        """Acts on a signal on which another rank has acted alone; called in another thread than the main one."""
        if signum in self._signals:
            self._pushed = signum
            _thread.interrupt_main(signum)

    def push(self) -> None:
        """Acts on a signal that has waited too long; called from time to time, in another thread than the main one."""
        for signum in (signal.SIGINT, signal.SIGTERM):
            if self._pushed is None and self._is_overdue(signum):
                self.follow(signum)

    def release(self) -> None:
        """Restores the handlers, and calls them for signals that were received and not acted on."""
        left = self.received & ~self.agreed  # a rank that acts sends the same signal to its children once more
        for signum, handler in self._handlers.items():
            if signal.getsignal(signum) == self._note:
                signal.signal(signum, handler)
        self.received = 0
        handlers, self._handlers = self._handlers, {}
        for bit, signum in enumerate(self._signals):
            if left & 1 << bit and callable(handlers.get(signum)):
                handlers[signum](signum, None)

    def _is_overdue(self, signum: signal.Signals) -> bool:
        if signum not in self._signals or not self.received & 1 << self._signals.index(signum):
            return False
        return time.monotonic() - self._first_s[signum] > self._patience_s

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return
        number = signal.Signals(signum)
        bit = 1 << self._signals.index(number)
        if self._pushed is number:
            self._pushed = None
            self._act_alone(number, bit)
            return
        now_s = time.monotonic()
        last_s, self._last_s[number] = self._last_s.get(number, float("-inf")), now_s
        if now_s - last_s < SAME_INTERRUPT_S:
            return
        if not self.received & bit:
            self._first_s[number] = now_s
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._on_interrupt is not None:
                self._on_interrupt(self._interrupts)
        self.received |= bit
        if not self.waits:
            self._act_alone(number, bit)

    def _act_alone(self, number: signal.Signals, bit: int) -> None:
        """Acts without the other ranks; they learn of it as of an exception, so no handler may wait for them."""
        if number == signal.SIGINT:
            self.received &= ~bit
            handler = self._handlers.get(number)
            if callable(handler):
                handler(number, None)
        elif number == signal.SIGTERM:
            self.received &= ~bit
            raise SIGTERMException
