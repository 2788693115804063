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
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_multigpu.job.guardian.interrupts import SAME_INTERRUPT_S

_SAME_TERMINATION_S = 0.9  # torchrun and srun send SIGTERM once more to ranks that a scheduler has signalled
_MAIN_THREAD_S = 1.0  # in which a main thread that runs Python code acts on a signal


class DeferredSignals:
    """Replaces the handlers of signals by one that records them.

    A process that was forked meanwhile, such as a loader's worker, ignores them: its rank decides when it ends.

    Args:
        signals: the signals to defer; each has a bit, in this order.
        patience_s: how long SIGINT and SIGTERM wait for the other ranks; later they act on this rank only.
        on_signal: called at each SIGINT and SIGTERM of this process, with the signal and how many have come.
        on_stuck: called in another thread where the main thread does not act on a signal either, since it waits in C
            code; ends that wait.

    Attributes:
        received: bits of the signals that this process has received.
        due: bits of the signals that some process of the job has received, and all processes know.
        waits: whether ranks will agree on another batch. If not, SIGINT and SIGTERM act at once.
        agreed: bits of the signals that all ranks have acted on together.
        late: whether a signal has waited out ``patience_s``, here or on the rank that this one follows.
    """

    def __init__(
        self,
        signals: list[signal.Signals],
        *,
        patience_s: float = float("inf"),
        on_signal: Callable[[signal.Signals, int], None] | None = None,
        on_stuck: Callable[[], object] | None = None,
    ) -> None:
        self.received = 0
        self.due = 0
        self.waits = True
        self.agreed = 0
        self.late = False
        self._signals = signals
        self._patience_s = patience_s
        self._on_signal = on_signal
        self._on_stuck = on_stuck
        self._handlers: dict[signal.Signals, Any] = {}
        self._first_s: dict[signal.Signals, float] = {}  # of signals that were not acted on so far
        self._last_s: dict[tuple[signal.Signals, bool], float] = {}
        self._numbers: Counter[signal.Signals] = Counter()
        self._pushed: signal.Signals | None = None
        self._pushed_s = 0.0
        self._cut_loose = False
        self._own: Counter[signal.Signals] = Counter()  # signals of this object, which are still to be counted
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
            if due & 1 << bit:
                self._first_s.pop(signum, None)
                if callable(self._handlers.get(signum)):
                    self._handlers[signum](signum, None)

    def has_agreed(self, signum: signal.Signals) -> bool:
        """True if all ranks have acted on the signal together."""
        return signum in self._signals and bool(self.agreed & 1 << self._signals.index(signum))

    def follow(self, signum: signal.Signals) -> None:
        """Acts on a signal on which another rank has acted alone; called in another thread than the main one."""
        if signum in self._signals and signal.getsignal(signum) == self._note:
            self._pushed, self._pushed_s = signum, time.monotonic()
            self._own[signum] += 1
            _thread.interrupt_main(signum)

    def push(self) -> None:
        """Acts on a signal that has waited too long; called from time to time, in another thread than the main one.

        The main thread acts as soon as it runs Python code. If it waits in a collective, the wait is ended a second
        later; a process that does not leave another wait either is ended after ``patience_s`` more.
        """
        for signum in (signal.SIGINT, signal.SIGTERM):
            if self._pushed is None and self._is_overdue(signum):
                self.late = True
                self.follow(signum)
        pushed, waited_s = self._pushed, time.monotonic() - self._pushed_s
        if pushed is not None and not self._cut_loose and waited_s > _MAIN_THREAD_S:
            self._cut_loose = True
            if self._on_stuck is not None:
                self._on_stuck()
        elif pushed is not None and waited_s > _MAIN_THREAD_S + self._patience_s:
            os._exit(128 + pushed)

    def count(self, number: int) -> None:
        """Counts a signal; called by the thread that sees it arrive, or else by the handler."""
        if number not in self._signals:
            return
        signum = signal.Signals(number)
        if self._own[signum] > 0:
            self._own[signum] -= 1
        elif not self._repeats(signum, handled=False):
            self._first_s.setdefault(signum, time.monotonic())
            self._numbers[signum] += 1
            if self._on_signal is not None:
                self._on_signal(signum, self._numbers[signum])

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
        first_s = self._first_s.get(signum)
        return first_s is not None and time.monotonic() - first_s > self._patience_s

    def _repeats(self, signum: signal.Signals, *, handled: bool) -> bool:
        """Whether the signal is the same as the one a moment ago."""
        now_s = time.monotonic()
        last_s, self._last_s[signum, handled] = self._last_s.get((signum, handled), float("-inf")), now_s
        return now_s - last_s < (_SAME_TERMINATION_S if signum == signal.SIGTERM else SAME_INTERRUPT_S)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return
        number = signal.Signals(signum)
        bit = 1 << self._signals.index(number)
        if not self._counts_arrivals:
            self.count(number)
        if self._pushed is number:
            self._pushed = None
            self._act_alone(number, bit)
        elif not self._repeats(number, handled=True):
            self.received |= bit
            if not self.waits:
                self._act_alone(number, bit)

    @property
    def _counts_arrivals(self) -> bool:
        """Whether another thread counts signals as they arrive."""
        return False

    def _act_alone(self, number: signal.Signals, bit: int) -> None:
        """Acts without the other ranks; they learn of it as of an exception, so no handler may wait for them."""
        self._first_s.pop(number, None)
        if number == signal.SIGINT:
            self.received &= ~bit
            handler = self._handlers.get(number)
            if callable(handler):
                handler(number, None)
        elif number == signal.SIGTERM:
            self.received &= ~bit
            raise SIGTERMException
