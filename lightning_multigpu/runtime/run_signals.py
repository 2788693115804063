"""The signals that end a run: SIGINT (Ctrl-C), SIGTERM, and the one upon which SLURM starts the job anew."""

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


class RunSignals:
    """Decides when a rank acts on signals.

    In training they wait for a batch that all ranks agree on, so that all save the same state and may talk to each
    other while they do. Elsewhere, and where no such batch comes, a rank acts alone: that is settled as an exception
    of this rank would be.
    """

    def __init__(self) -> None:
        self._held: DeferredSignals | None = None
        self._pusher: _Pusher | None = None

    def begin(self, environment: Any, *, patience_s: float, on_interrupt: Callable[[int], None] | None) -> bool:
        """Holds SIGINT from now on; loaders fork their workers later, which therefore ignore it.

        Args:
            environment: Lightning's, which knows of SLURM.
            patience_s: how long a signal waits for the agreement.
            on_interrupt: told of the first and second SIGINT; None where nobody ends the job at the second.

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
        self._held = DeferredSignals(signals, patience_s=patience_s, on_interrupt=on_interrupt or _end_at_second)
        self._held.waits = False
        if is_ours:
            self._held.hold(signal.SIGINT)
        self._pusher = _Pusher(self._held)
        self._pusher.start()
        return is_ours

    def stage_starts(self, trainer: pl.Trainer, *, training: bool) -> None:
        """Holds the others too, once Lightning has set its handlers: a Tuner trains before that."""
        if self._held is None:
            return
        if has_set_signal_handlers(trainer):
            self._held.hold()
        self._held.waits = self._held.waits or training
        self._restore_at_teardown(trainer)

    def training_ends(self, gather: Callable[[int], list[int]]) -> None:
        """Acts on what came after the last batch; a collective.

        Args:
            gather: collects an object of every rank.
        """
        if self._held is not None:
            self._held.waits = False
            for received in gather(self._held.received):
                self._held.due |= received
            self._held.act()

    @property
    def holds_interrupts(self) -> bool:
        """Whether SIGINT is held, and not left to a handler of the user's program."""
        return self._held is not None and self._held.handler_before(signal.SIGINT) is not None

    @property
    def flags(self) -> int:
        """What this rank wants the others to know."""
        return 0 if self._held is None else self._held.received

    def agree(self, flags: int, *, may_act: bool) -> None:
        """All ranks have learnt of ``flags``; they act now if all may."""
        if self._held is not None:
            self._held.due |= flags
            if self._held.due and may_act:
                self._held.act()

    def agreed_on(self, error: BaseException) -> bool:
        """Whether ``error`` is what all ranks raise together."""
        if self._held is None:
            return False
        number = {KeyboardInterrupt: signal.SIGINT, SIGTERMException: signal.SIGTERM}.get(type(error))
        return number is not None and self._held.has_agreed(number)

    def follow(self, what: str) -> None:
        """Another rank says ``what`` of its end; if a signal has ended it, it ends this one too."""
        number = {WAS_INTERRUPTED: signal.SIGINT, WAS_TERMINATED: signal.SIGTERM}.get(what)
        if self._held is not None and number is not None:
            self._held.follow(number)

    def end(self, trainer: pl.Trainer | None) -> None:
        """Gives the signals back; ``trainer`` is about to give back what it has found."""
        if trainer is not None:
            self._restore_at_teardown(trainer)
        if self._pusher is not None:
            self._pusher.stop()
            self._pusher = None
        held, self._held = self._held, None
        if held is not None:
            held.release()

    def _restore_at_teardown(self, trainer: pl.Trainer) -> None:
        before = None if self._held is None else self._held.handler_before(signal.SIGINT)
        if before is not None:
            restore_handler_at_teardown(trainer, signal.SIGINT, before)


class _Pusher(threading.Thread):
    """Lets a signal act that has waited for the other ranks in vain."""

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
