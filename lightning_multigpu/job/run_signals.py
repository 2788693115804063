"""The signals that end a run: SIGINT (Ctrl-C), SIGTERM, and SLURM's signal to start the job anew."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_multigpu._lightning_internals import has_set_signal_handlers, restore_handler_at_teardown
from lightning_multigpu.job.deferred_signals import DeferredSignals
from lightning_multigpu.job.guardian.interrupts import INTERRUPTED_STATUS, signal_of, was_late

if TYPE_CHECKING:
    import lightning.pytorch as pl

_POLL_S = 0.25
_STATUS = {signal.SIGINT: INTERRUPTED_STATUS, signal.SIGTERM: 128 + signal.SIGTERM}


class RunSignals(DeferredSignals):
    """Decides when a rank acts on signals; outside a run it defers none.

    In training signals wait for a batch on which all ranks agree, so that all save the same state and may use
    collectives meanwhile. Elsewhere, and if no such batch comes, a rank acts alone, as by an exception.
    """

    def __init__(self) -> None:
        super().__init__([])
        self._pusher: _Pusher | None = None

    def begin(
        self,
        environment: Any,
        *,
        patience_s: float,
        on_signal: Callable[[int, int], None] | None,
        on_stuck: Callable[[], object],
    ) -> bool:
        """Defers SIGINT from now on; workers that loaders fork later ignore it.

        Args:
            environment: Lightning's cluster environment, which detects SLURM.
            patience_s: how long a signal waits for the agreement.
            on_signal: called with the exit status of the job and 1, 2... at the first, second... SIGINT, and at the
                second SIGTERM; None without a guardian: the second then ends this process.
            on_stuck: ends the waits in collectives of a main thread that does not act on a signal.

        Returns:
            False if the user's program has a handler for SIGINT: it is left alone.
        """
        signals = [signal.SIGTERM]
        requeue = getattr(environment, "requeue_signal", None)
        if requeue is not None and getattr(environment, "auto_requeue", False):
            signals.append(signal.Signals(requeue))
        is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_ours:
            signals.append(signal.SIGINT)
        report = on_signal or _end_at_second

        def count(signum: signal.Signals, number: int) -> None:
            if signum in _STATUS and (signum == signal.SIGINT or number > 1):
                report(_STATUS[signum], number)

        super().__init__(signals, patience_s=patience_s, on_signal=count, on_stuck=on_stuck)
        self.waits = False
        if is_ours:
            self.hold(signal.SIGINT)
        self._pusher = pusher = _Pusher(self)
        pusher.start()
        return is_ours

    def stage_starts(self, trainer: pl.Trainer, *, training: bool) -> None:
        """Defers the other signals too, once Lightning has set its handlers: a Tuner trains before that."""
        if has_set_signal_handlers(trainer):
            self.hold()
        self.waits = self.waits or training
        self._restore_at_teardown(trainer)

    def training_ends(self, gather: Callable[[int], list[int]]) -> None:
        """Acts on signals that came after the last batch; a collective.

        Args:
            gather: collects an object of every rank.
        """
        self.waits = False
        for received in gather(self.received):
            self.due |= received
        self.act()

    @property
    @override
    def _counts_arrivals(self) -> bool:
        return self._pusher is not None and self._pusher.sees_arrivals

    @property
    def holds_interrupts(self) -> bool:
        """True if SIGINT is deferred, and not left to a handler of the user's program."""
        return self.handler_before(signal.SIGINT) is not None

    def agree(self, flags: int, *, may_act: bool) -> None:
        """Takes signals that some rank has received and all ranks know; all act on them now, if they may."""
        self.due |= flags
        if self.due and may_act:
            self.act()

    def agreed_on(self, error: BaseException) -> bool:
        """True if ``error`` is raised by all ranks together."""
        number = {KeyboardInterrupt: signal.SIGINT, SIGTERMException: signal.SIGTERM}.get(type(error))
        return number is not None and self.has_agreed(number)

    def follow_failure(self, what: str) -> None:
        """Acts on the signal that has ended another rank, if ``what`` names one; called in another thread.

        A signal that was late for that rank is late for this one, since both end with the same exit status.
        """
        number = signal_of(what)
        if number is not None:
            self.late = self.late or was_late(what)
            self.follow(number)

    def end(self, trainer: pl.Trainer | None) -> None:
        """Restores the handlers; ``trainer`` is about to restore the handlers from before it."""
        if trainer is not None:
            self._restore_at_teardown(trainer)
        if self._pusher is not None:
            self._pusher.stop()
            self._pusher = None
        self.release()
        self._signals = []  # another rank's end by a signal no longer ends this rank

    def _restore_at_teardown(self, trainer: pl.Trainer) -> None:
        before = self.handler_before(signal.SIGINT)
        if before is not None:
            restore_handler_at_teardown(trainer, signal.SIGINT, before)


class _Pusher(threading.Thread):
    """Counts signals as they arrive, also while the main thread waits in C code; acts on those that wait too long.

    Python's C handler writes each signal's number to a pipe at once; the handlers in Python run in the main thread.
    """

    def __init__(self, held: DeferredSignals) -> None:
        super().__init__(name="signal-watch", daemon=True)
        self._held = held
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.sees_arrivals = _take_wakeups(self._writer)
        self._stopped = threading.Event()

    @override
    def run(self) -> None:
        while not self._stopped.is_set():
            if select.select([self._reader], [], [], _POLL_S)[0]:
                for number in os.read(self._reader, 256):
                    self._held.count(number)
            self._held.push()

    def stop(self) -> None:
        self._stopped.set()
        self.join(1)
        if self.sees_arrivals:
            _give_wakeups_back(self._writer)
        os.close(self._writer)
        os.close(self._reader)


_wakeups = -1  # this process's descriptor, if the C handler writes to one of ours


def _take_wakeups(descriptor: int) -> bool:
    """Makes the C handler write to ``descriptor``; False if the user's program has its own, or in another thread."""
    global _wakeups
    if threading.current_thread() is not threading.main_thread():
        return False
    before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        return False
    _wakeups = descriptor
    return True


def _give_wakeups_back(descriptor: int) -> None:
    global _wakeups
    _wakeups = -1
    with contextlib.suppress(ValueError):  # in another thread than the main one
        now = signal.set_wakeup_fd(-1)
        if now != descriptor:
            signal.set_wakeup_fd(now)


def _forget_wakeups() -> None:
    """In a forked process: signals of a loader's worker are not its rank's."""
    if _wakeups != -1:
        _give_wakeups_back(_wakeups)


os.register_at_fork(after_in_child=_forget_wakeups)


def _end_at_second(status: int, number: int) -> None:
    if number > 1:
        os._exit(status)
