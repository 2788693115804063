"""The signals that end a run: SIGINT (Ctrl-C), SIGTERM, and SLURM's signal to start the job anew.

A scheduler, or a user, signals each rank at any place in its program. Lightning's handlers save a checkpoint or signal
the other ranks, which takes collectives: if they ran at once, one rank would wait in its handler while another waits
for its gradients. So signals wait until all ranks have reached the same batch.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_multigpu._lightning_internals import has_set_signal_handlers, restore_handler_at_teardown
from lightning_multigpu.job.guardian import Failure
from lightning_multigpu.job.guardian.interrupts import SAME_INTERRUPT_S

if TYPE_CHECKING:
    import lightning.pytorch as pl

_POLL_S = 0.25
_SAME_TERMINATION_S = 0.9  # torchrun and srun send SIGTERM once more to ranks that a scheduler has signalled
_MAIN_THREAD_S = 1.0  # in which a main thread that runs Python code acts on a signal


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
        late: whether a signal has waited out ``patience_s``, here or on the rank that this one follows.
    """

    def __init__(self) -> None:
        self._pusher: _Pusher | None = None
        self.defer([])

    def defer(
        self,
        signals: list[signal.Signals],
        *,
        patience_s: float = float("inf"),
        on_signal: Callable[[int, int], None] | None = None,
        on_stuck: Callable[[], object] | None = None,
    ) -> None:
        """Sets the signals that :meth:`hold` defers; each has a bit, in this order.

        The other arguments are those of :meth:`begin`.
        """
        self.received = self.due = self.agreed = 0
        self.waits, self.late = True, False
        self._signals = signals
        self._patience_s = patience_s
        self._on_signal, self._on_stuck = on_signal, on_stuck
        self._handlers: dict[signal.Signals, Any] = {}
        self._first_s: dict[signal.Signals, float] = {}  # of signals that were not acted on so far
        self._last_s: dict[tuple[signal.Signals, bool], float] = {}
        self._numbers: Counter[signal.Signals] = Counter()
        self._pushed: signal.Signals | None = None
        self._pushed_s = 0.0
        self._cut_loose = False
        self._own: Counter[signal.Signals] = Counter()  # signals of this object, which are still to be counted
        self._process = os.getpid()

    def begin(
        self,
        environment: Any,
        *,
        patience_s: float,
        on_signal: Callable[[int, int], None],
        on_stuck: Callable[[], object],
    ) -> bool:
        """Defers SIGINT from now on; workers that loaders fork later ignore it.

        Args:
            environment: Lightning's cluster environment, which detects SLURM.
            patience_s: how long SIGINT and SIGTERM wait for the agreement; then they act on this rank only.
            on_signal: called with the exit status of the job and 1, 2... at the first, second... SIGINT, and at the
                second SIGTERM.
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
        self.defer(signals, patience_s=patience_s, on_signal=on_signal, on_stuck=on_stuck)
        self.waits = False
        if is_ours:
            self.hold(signal.SIGINT)
        self._pusher = pusher = _Pusher(self)
        pusher.start()
        return is_ours

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

    def agreed_on(self, error: BaseException) -> bool:
        """True if ``error`` is raised by all ranks together."""
        number = {KeyboardInterrupt: signal.SIGINT, SIGTERMException: signal.SIGTERM}.get(type(error))
        return number is not None and self.has_agreed(number)

    def follow_failure(self, failure: Failure) -> None:
        """Acts on the signal that has ended another rank, if one has; called in another thread.

        A signal that was late for that rank is late for this one, since both end with the same exit status.
        """
        if failure.signal:
            self.late = self.late or failure.is_late
            self.follow(signal.Signals(failure.signal))

    def end(self, trainer: pl.Trainer | None) -> None:
        """Restores the handlers; ``trainer`` is about to restore the handlers from before it."""
        if trainer is not None:
            self._restore_at_teardown(trainer)
        if self._pusher is not None:
            self._pusher.stop()
            self._pusher = None
        self.release()
        self._signals = []  # another rank's end by a signal no longer ends this rank

    def hold(self, *only: signal.Signals) -> None:
        """Replaces the signals' handlers, by default all; only the main thread can, other threads do nothing."""
        if threading.current_thread() is threading.main_thread():
            for signum in only or self._signals:
                if signal.getsignal(signum) != self._note:
                    self._handlers[signum] = signal.signal(signum, self._note)

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
            first_s = self._first_s.get(signum)
            is_overdue = first_s is not None and time.monotonic() - first_s > self._patience_s
            if self._pushed is None and is_overdue:
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
            ends = signum == signal.SIGINT or (signum == signal.SIGTERM and self._numbers[signum] > 1)
            if self._on_signal is not None and ends:
                self._on_signal(128 + signum, self._numbers[signum])  # the status of a shell

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
        if self._pusher is None or not self._pusher.sees_arrivals:
            self.count(number)
        if self._pushed is number:
            self._pushed = None
            self._act_alone(number, bit)
        elif not self._repeats(number, handled=True):
            self.received |= bit
            if not self.waits:
                self._act_alone(number, bit)

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

    def _restore_at_teardown(self, trainer: pl.Trainer) -> None:
        if signal.SIGINT in self._handlers:
            restore_handler_at_teardown(trainer, signal.SIGINT, self._handlers[signal.SIGINT])


class _Pusher(threading.Thread):
    """Counts signals as they arrive, also while the main thread waits in C code; acts on those that wait too long.

    Python's C handler writes each signal's number to a pipe at once; the handlers in Python run in the main thread.
    """

    def __init__(self, held: RunSignals) -> None:
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
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread, too
            os.write(self._writer, b"\0")  # no signal has this number
        self.join(1)
        if self.sees_arrivals:
            _give_wakeups_back()
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


def _give_wakeups_back() -> None:
    """Also in a forked process: signals of a loader's worker are not its rank's."""
    global _wakeups
    ours, _wakeups = _wakeups, -1
    with contextlib.suppress(ValueError):  # in another thread than the main one
        if ours != -1 and (now := signal.set_wakeup_fd(-1)) != ours:
            signal.set_wakeup_fd(now)


os.register_at_fork(after_in_child=_give_wakeups_back)
