"""Failure watch: the failure of one rank becomes a failure of all ranks, with its rank and cause.

A rank that raises reports to the guardian of its host and aborts its process groups. The guardians inform all other
ranks, which abort their groups too, so that no rank waits in a group. Each of these ranks then raises the exception
that :meth:`~lightning_multigpu.job.guardian.Failure.exception` makes from the text of the failure, or its own one if
that is of the same class and line. The guardian prints the failure when all ranks have left the run, and ends.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_multigpu._lightning_internals import EndOfRun
from lightning_multigpu.communication.digest import ranks_text
from lightning_multigpu.job.checkpoint_files.last_checkpoint import last_checkpoint_of
from lightning_multigpu.job.guardian import Failure, GuardianClient, RankFailedError
from lightning_multigpu.job.guardian.failure import text_of
from lightning_multigpu.job.guardian.hang.flight_recorder import FlightRecorder
from lightning_multigpu.job.loader_workers import ignoring_ends_of_workers
from lightning_multigpu.job.run_signals import RunSignals
from lightning_multigpu.job.uncaught_errors import EXIT, resume_advice

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_multigpu.job.run_context import RunContext

_SETTLE_S = 3.0
_SETTLE_AFTER_SIGTERM_S = 1.0  # a launcher that sees a rank end may be faster with SIGTERM than the guardian
SIGTERM_STATUS = 128 + signal.SIGTERM  # as a shell reports the end by a signal
_CONNECTION_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket|gloo|nccl|timed out|timeout|abort|parameter server",
    re.IGNORECASE,
)

_failed_worlds: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()

# The connection of this process to its guardian, from its first run until it has left a failed one.
KEPT: list[GuardianClient] = []


def leave_guardian() -> None:
    """Ends the connection to the guardian, which ends with the last one."""
    while KEPT:
        client = KEPT.pop()
        client.leave()
        if client.started is not None:
            client.started.stop()


class FailureWatch:
    """Ends this rank's run when another rank fails, and informs the others when this rank fails.

    Attributes:
        client: the connection to the guardian of this host; None between two runs.
        failure: the failure that has ended this run, this rank's own or another's; None while there is none.
        ranks_have_ended: in the process that has spawned ranks, whether they have failed, and their state is lost.
        is_lost: whether this rank has failed and the job goes on without it.
    """

    def __init__(self, signals: RunSignals) -> None:
        self.client: GuardianClient | None = None
        self.failed = False
        self.failure: Failure | None = None
        self.ranks_have_ended = self.is_lost = False
        self.signals = signals
        self._cut: Callable[[], object] | None = None
        self._world_size = 0  # once the ranks have joined
        self._trainer: pl.Trainer | None = None  # of a failed run that can be resumed
        self._hooks_follow = self._can_be_lost = False

    def begin(self, cut: Callable[[], object]) -> None:
        """Begins a new run, whose ranks have yet to join; ``cut`` ends their waits until then."""
        self.failed = self.is_lost = self._can_be_lost = False
        self.failure = None
        EXIT.forget()
        self._cut, self._world_size = cut, 0

    def joined(self, cut: Callable[[], object], world_size: int) -> None:
        """Notes that the ranks have joined; ``cut`` aborts their groups when a rank fails. Raises as :meth:`check`."""
        self._cut, self._world_size = cut, world_size
        self.check()

    def check(self) -> None:
        """Raises RankFailedError if another rank has failed, or has ended since an earlier run."""
        if self.failure is not None:
            raise RankFailedError(self.failure.describe())

    def can_be_lost(self) -> None:
        """Declares that the job goes on without this rank if it fails in this run; not for rank 0.

        Call it when the rank is in no process group with other ranks.
        """
        assert self.client is not None
        self.client.can_be_lost()
        self._can_be_lost = True

    @property
    def flight_recorder(self) -> FlightRecorder | None:
        """The page of shared memory in which this rank notes its steps and collectives for the guardian."""
        return None if self.client is None else self.client.flight_recorder

    def receive(self, failure: Failure) -> None:
        """Receives another rank's failure from the guardian; called in a thread of its own."""
        self.failure = self.failure or failure
        if not self.failed:
            self.signals.follow(signal.Signals(failure.signal) if failure.signal else None)
        self._abort()

    def leave(self) -> None:
        """Ends the watch at the strategy's teardown; if hooks of a good run follow, :meth:`guarded` does."""
        if self.failed or not self._hooks_follow:
            self.stop()

    def stop(self) -> None:
        """Ends the watch of this run: the end of this process is no failure until a rank begins the next run.

        After a failure it waits until all ranks have left the run, and the guardian has printed the failure.
        """
        client, self.client = self.client, None
        self._cut, self._world_size = None, 0
        if client is None:
            return
        if self.failure is None or self.is_lost:
            client.rest()
            return
        advice = ""
        with contextlib.suppress(Exception):  # a directory that cannot be read must not hide the failure
            advice = "" if self._trainer is None else resume_advice(last_checkpoint_of(self._trainer))
        EXIT.is_printed = True  # also where a launcher ends this rank meanwhile
        with contextlib.suppress(KeyboardInterrupt, SIGTERMException):
            EXIT.is_printed = client.leave_failed_run(advice)
        leave_guardian()

    def guarded(
        self, function: Callable[..., Any], args: Any, kwargs: Any, *, run: RunContext, trainer: pl.Trainer | None
    ) -> Any:
        """Runs a rank's work; if the job fails, raises the exception of the rank that failed."""
        self._hooks_follow = True
        try:
            result = function(*args, **kwargs)
            self._finish()
            return result
        except BaseException as error:
            if isinstance(error, SIGTERMException):
                error.code = SIGTERM_STATUS  # Lightning sets none, and the process would seem to have succeeded
            # A rank that can be lost has no groups to agree on a signal in, and acts alone.
            if (self.signals.agreed_on(error) and not self._can_be_lost) or isinstance(error, EndOfRun):
                self._hooks_follow = False  # all ranks end together; later errors are no failures of the job
                if not isinstance(error, EndOfRun):
                    EXIT.after(error, run.failure_timeout_s)
                raise
            step = trainer.global_step if trainer is not None and self._world_size else None
            failure = self.settle(error, run, step)
            EXIT.is_printed = self.is_lost
            if trainer is not None and trainer.lightning_module is not None:
                _compute_alone(trainer.lightning_module)
            self._trainer = trainer if run.node_rank == 0 and has_trained(trainer) else None
            raised = failure.exception() if failure is not None and isinstance(error, Exception) else error
            EXIT.after(raised, run.failure_timeout_s)
            if raised is error:
                raise
            raise raised from None

    @ignoring_ends_of_workers()
    def settle(self, error: BaseException, run: RunContext, step: int | None) -> Failure | None:
        """Finds the rank whose failure has caused ``error``; reports to the guardian if it is this rank.

        Returns:
            The failure of another rank, or None if ``error`` is this rank's own, also if another rank was first.
        """
        self.failed, self._hooks_follow = True, False
        is_connection_loss = isinstance(error, RuntimeError) and _CONNECTION_LOST.search(text_of(error))
        patience_s = _SETTLE_S if is_connection_loss else 0.0
        if isinstance(error, SIGTERMException):
            patience_s = _SETTLE_AFTER_SIGTERM_S
        other = self._verdict(patience_s)
        own = Failure.of(error, rank=run.rank, step=step)
        if other is None:
            error.add_note(own.describe())
            if self.client is not None:
                signum = {KeyboardInterrupt: signal.SIGINT, SIGTERMException: signal.SIGTERM}.get(type(error))
                if signum is not None:  # the place at which a signal has struck is not the cause
                    what = f"was interrupted ({signum.name})"
                    own = own._replace(what=what, traceback="", signal=signum)
                self.client.failed(own)
            other = self._verdict(0.0 if self._can_be_lost else _SETTLE_S)  # another rank may have been first
        is_alike = other is None or own.is_alike(other)
        self.failure = own if other is None or (is_alike and other.rank == own.rank) else other
        self.is_lost = self._can_be_lost and other is None and not isinstance(error, KeyboardInterrupt)
        self._abort()
        return None if is_alike else other

    def _verdict(self, patience_s: float) -> Failure | None:
        """The failure of the job, which the guardian tells all ranks; None if it does not within ``patience_s``."""
        until_s = time.monotonic() + patience_s
        while self.failure is None and self.client is not None and time.monotonic() < until_s:
            time.sleep(0.02)
        return self.failure

    def _finish(self) -> None:
        """Waits until the run has ended well for all ranks; else raises RankFailedError."""
        if self.client is not None and self._world_size:
            ranks = ranks_text(range(self._world_size))
            note = self.client.flight_recorder.began("barrier", group="end of the run", ranks=ranks)
            failure = self.client.finish()
            if note is not None:
                note.ended()
            if failure is not None:
                raise RankFailedError(failure.describe())
        self._hooks_follow = False
        self.stop()

    def _abort(self) -> None:
        cut, self._cut = self._cut, None
        if cut is not None:
            cut()


def _compute_alone(module: pl.LightningModule) -> None:
    """Has the metrics of a module compute from this rank's states, until this process has another default group.

    Callbacks that save at an exception read the monitored metric, which would wait for ranks that have ended.
    """
    if dist.is_initialized():
        assert dist.group.WORLD is not None
        _failed_worlds.add(dist.group.WORLD)
        parts: Iterable[Any] = module.modules()
        for part in parts:
            if hasattr(part, "distributed_available_fn"):  # a torchmetrics.Metric
                part.distributed_available_fn = partial(_is_available, part.distributed_available_fn)


def _is_available(before: Callable[[], bool]) -> bool:
    return dist.is_initialized() and dist.group.WORLD not in _failed_worlds and before()


def has_trained(trainer: pl.Trainer | None) -> TypeGuard[pl.Trainer]:
    """True in a fit that has completed a step, or has resumed from a checkpoint of one."""
    return trainer is not None and trainer.state.fn == TrainerFn.FITTING and trainer.global_step > 0


def advise_resuming(trainer: pl.Trainer | None, exception: BaseException) -> None:
    """Prints on rank 0 how to resume, after the callbacks have saved, if a signal has ended the run."""
    if isinstance(exception, KeyboardInterrupt | SIGTERMException) and has_trained(trainer):
        advice = resume_advice(last_checkpoint_of(trainer))
        if advice and trainer.is_global_zero:
            sys.stderr.write(f"{advice}\n")
