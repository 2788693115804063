"""The signals that end a run: SIGINT (Ctrl-C), SIGTERM, and SLURM's signal to start the job anew.

A scheduler, or a user, signals each rank at any place in its program. Lightning's handlers save a checkpoint or signal
the other ranks, which takes collectives: if they ran at once, one rank would wait in its handler while another waits
for its gradients. So signals wait until all ranks have reached the same batch.
"""

from __future__ import annotations

import _thread
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_multigpu._lightning_internals import has_set_signal_handlers, restore_handler_at_teardown

if TYPE_CHECKING:
    import lightning.pytorch as pl

SAME_INTERRUPT_S = 0.3  # `timeout` and some wrappers signal the process and its group
_SAME_TERMINATION_S = 0.9  # torchrun and srun send SIGTERM once more to ranks that a scheduler has signalled
_ERRORS = {KeyboardInterrupt: signal.SIGINT, SIGTERMException: signal.SIGTERM}


class RunSignals:
    """Decides when a rank acts on signals; outside a run it defers none.

    In training signals wait for a batch on which all ranks agree, so that all save the same state and may use
    collectives meanwhile. Elsewhere, and if no such batch comes, a rank acts alone, as by an exception. A process that
    was forked meanwhile, such as a loader's worker, ignores them: its rank decides when it ends.

    Attributes:
        received: bits of the signals that this process has received.
        due: bits of the signals that some process of the job has received, and all processes know.
        waits: whether ranks will agree on another batch. If not, SIGINT and SIGTERM act at once.
        agreed: bits of the signals that all ranks have acted on together.
        on_signal: called with the exit status of the job and 1, 2... at the first, second... SIGINT or SIGTERM; with 0
            when the rank acts on one. The guardian ends the wait for a common batch if that does not come in time.
    """

    def __init__(self) -> None:
        self._watch: _Watch | None = None
        self.defer([])

    def defer(self, signals: list[signal.Signals]) -> None:
        """Sets the signals that :meth:`hold` defers; each has a bit, in this order."""
        self.received = self.due = self.agreed = self._alone = 0
        self.waits = True
        self._signals = signals
        self.on_signal: Callable[[int, int], None] | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._last_s: dict[signal.Signals, float] = {}
        self._numbers: Counter[signal.Signals] = Counter()
        self._followed: signal.Signals | None = None
        self._own: set[signal.Signals] = set()  # signals of this object, which are not counted
        self._process = os.getpid()

    def begin(self, environment: Any, on_signal: Callable[[int, int], None]) -> None:
        """Defers SIGINT, unless the user's program handles it; workers that loaders fork later ignore it.

        ``environment`` is Lightning's cluster environment, which detects SLURM.
        """
        signals = [signal.SIGTERM]
        requeue = getattr(environment, "requeue_signal", None)
        if requeue is not None and getattr(environment, "auto_requeue", False):
            signals.append(signal.Signals(requeue))
        is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_ours:
            signals.append(signal.SIGINT)
        self.defer(signals)
        self.on_signal, self.waits = on_signal, False
        if is_ours:
            self.hold(signal.SIGINT)
        self._watch = _Watch(self)
        self._watch.start()

    def stage_starts(self, trainer: pl.Trainer, *, training: bool = False) -> None:
        """Defers the other signals too, once Lightning has set its handlers: a Tuner trains before that."""
        if has_set_signal_handlers(trainer):
            self.hold()
        self.waits = self.waits or training
        self._restore_at_teardown(trainer)

    def training_ends(self, gather: Callable[[int], list[int]]) -> None:
        """Acts on signals that came after the last batch; ``gather``, of every rank's object, is a collective."""
        self.waits = False
        for received in gather(self.received):
            self.due |= received
        self.act()

    @property
    def holds_interrupts(self) -> bool:
        """True if SIGINT is deferred, and not left to a handler of the user's program."""
        return signal.SIGINT in self._handlers

    def agree(self, flags: int, *, may_act: bool) -> None:
        """Takes signals that some rank has received and all ranks know; all act on them now, if they may."""
        self.due |= flags
        if self.due and may_act:
            self.act()

    def act(self) -> None:
        """Calls the replaced handlers of all signals that are due; all ranks do so together."""
        due, self.due = self.due, 0
        if due:
            self._tell(0, 0)
        self.received &= ~due
        self.agreed |= due
        for signum in self._signals:
            if due & self._bit(signum):
                self._handle(signum)

    def agreed_on(self, error: BaseException) -> bool:
        """True if ``error`` is of a signal that all ranks have acted on together."""
        signum = _ERRORS.get(type(error))
        return signum in self._signals and bool(self.agreed & self._bit(signum))

    def follow(self, signum: signal.Signals | None) -> None:
        """Acts on a signal alone, as soon as the main thread runs Python code; called in another thread."""
        if signum is not None and signum in self._signals and signal.getsignal(signum) == self._note:
            self._followed = signum
            self._own.add(signum)
            _thread.interrupt_main(signum)

    def count(self, number: int) -> None:
        """Counts a signal; called by the thread that sees it arrive, or else by the handler."""
        if number not in self._signals:
            return
        signum, now_s = signal.Signals(number), time.monotonic()
        if signum in self._own:
            self._own.discard(signum)
            return
        last_s, self._last_s[signum] = self._last_s.get(signum, float("-inf")), now_s
        if now_s - last_s < (_SAME_TERMINATION_S if signum == signal.SIGTERM else SAME_INTERRUPT_S):
            return
        self._numbers[signum] += 1
        if signum in _ERRORS.values():
            self._tell(signum, self._numbers[signum])

    def hold(self, *only: signal.Signals) -> None:
        """Replaces the signals' handlers, by default all; only the main thread can, other threads do nothing."""
        if threading.current_thread() is threading.main_thread():
            for signum in only or self._signals:
                if signal.getsignal(signum) != self._note:
                    self._handlers[signum] = signal.signal(signum, self._note)

    def end(self, trainer: pl.Trainer | None) -> None:
        """Restores the handlers, and calls them for signals that were received and not acted on.

        ``trainer`` is about to restore the handlers from before it.
        """
        if trainer is not None:
            self._restore_at_teardown(trainer)
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        left, self.received = self.received & ~self.agreed, 0  # a rank that acts signals its children once more
        handlers, self._handlers = self._handlers, {}
        for signum, handler in handlers.items():
            if signal.getsignal(signum) == self._note:
                signal.signal(signum, handler)
        signals, self._signals = self._signals, []  # another rank's end by a signal no longer ends this rank
        for bit, signum in enumerate(signals):
            if left & 1 << bit and callable(handlers.get(signum)):
                handlers[signum](signum, None)

    def _tell(self, signum: int, number: int) -> None:
        if self.on_signal is not None:
            self.on_signal(128 + signum, number)  # the status of a shell

    def _bit(self, signum: signal.Signals) -> int:
        return 1 << self._signals.index(signum)

    def _handle(self, signum: signal.Signals) -> None:
        if callable(self._handlers.get(signum)):
            self._handlers[signum](signum, None)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return
        number = signal.Signals(signum)
        if self._watch is None or not self._watch.sees_arrivals:
            self.count(number)
        if self._followed is number:
            self._followed = None
            self._act_alone(number)
        elif not self._bit(number) & (self.agreed | self._alone):
            self.received |= self._bit(number)
            if not self.waits:
                self._act_alone(number)

    def _act_alone(self, number: signal.Signals) -> None:
        """Acts without the other ranks; they learn of it as of an exception, so no handler may wait for them."""
        if number not in _ERRORS.values():
            return
        self._tell(number, 0)
        self._alone |= self._bit(number)
        self.received &= ~self._alone
        if number == signal.SIGTERM:
            raise SIGTERMException
        self._handle(number)

    def _restore_at_teardown(self, trainer: pl.Trainer) -> None:
        if signal.SIGINT in self._handlers:
            restore_handler_at_teardown(trainer, signal.SIGINT, self._handlers[signal.SIGINT])


class _Watch(threading.Thread):
    """Counts signals as they arrive, also while the main thread waits in C code.

    Python's C handler writes each signal's number to a socket at once; the handlers in Python run in the main thread.
    """

    def __init__(self, signals: RunSignals) -> None:
        super().__init__(name="signal-watch", daemon=True)
        self._signals = signals
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self.sees_arrivals = _send_arrivals(self._writer.fileno())

    @override
    def run(self) -> None:
        arrived = b""
        while 0 not in arrived:
            for number in (arrived := self._reader.recv(256)):
                self._signals.count(number)

    def stop(self) -> None:
        self._writer.send(b"\0")  # no signal has this number
        self.join(1)
        if self.sees_arrivals:
            _send_arrivals(-1)
        self._reader.close()
        self._writer.close()


_descriptor = -1  # to which the C handler writes the numbers


def _send_arrivals(descriptor: int) -> bool:
    """Makes the C handler write to ``descriptor``; False if the user's program has its own, or in another thread."""
    global _descriptor
    if threading.current_thread() is not threading.main_thread():
        return False
    before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    if before not in (-1, _descriptor):
        signal.set_wakeup_fd(before)
        return False
    _descriptor = descriptor
    return True


os.register_at_fork(after_in_child=lambda: _send_arrivals(-1))  # signals of a loader's worker are not its rank's
