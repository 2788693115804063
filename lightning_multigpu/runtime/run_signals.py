"""The signals that end a run: SIGINT (Ctrl-C), SIGTERM, and SLURM's signal to start the job anew."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_multigpu._lightning_internals import has_set_signal_handlers, restore_handler_at_teardown
from lightning_multigpu.guardian.interrupts import INTERRUPTED_STATUS, WAS_INTERRUPTED, WAS_TERMINATED
from lightning_multigpu.runtime.deferred_signals import DeferredSignals

if TYPE_CHECKING:
    import lightning.pytorch as pl

_POLL_S = 0.25


class RunSignals(DeferredSignals):
    """Decides when a rank acts on signals; outside a run it defers none.

    In training signals wait for a batch on which all ranks agree, so that all save the same state and may use
    collectives meanwhile. Elsewhere, and if no such batch comes, a rank acts alone, as by an exception.
    """

    def __init__(self) -> None:
        super().__init__([])
        self._pusher: _Pusher | None = None

    def begin(self, environment: Any, *, patience_s: float, on_interrupt: Callable[[int], None] | None) -> bool:
        """Defers SIGINT from now on; workers that loaders fork later ignore it.

        Args:
            environment: Lightning's cluster environment, which detects SLURM.
            patience_s: how long a signal waits for the agreement.
            on_interrupt: called with 1 and 2 at the first and second SIGINT; None without a guardian: the second then
                ends this process.

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
        super().__init__(signals, patience_s=patience_s, on_interrupt=on_interrupt or _end_at_second)
        self.waits = False
        if is_ours:
            self.hold(signal.SIGINT)
        self._pusher = _Pusher(self)
        self._pusher.start()
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
        """Acts on the signal that has ended another rank, if ``what`` names one; called in another thread."""
        number = {WAS_INTERRUPTED: signal.SIGINT, WAS_TERMINATED: signal.SIGTERM}.get(what)
        if number is not None:
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
    """Acts on signals that have waited for the other ranks too long."""

    def __init__(self, held: DeferredSignals) -> None:
        super().__init__(name="signal-watch", daemon=True)
        self._held = held
        self._stopped = threading.Event()

    @override
    def run(self) -> None:
        while not self._stopped.wait(_POLL_S):
            self._held.push()

    def stop(self) -> None:
        self._stopped.set()
        self.join(1)


def _end_at_second(number: int) -> None:
    if number > 1:
        os._exit(INTERRUPTED_STATUS)
