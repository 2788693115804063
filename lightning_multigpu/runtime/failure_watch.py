"""Turns the failure of one rank into the same, named failure of all ranks.

A rank that raises leaves word on the :class:`~lightning_multigpu.communication.failure_board.FailureBoard` and aborts
its process groups. The others are then either told by their watching thread, which aborts their groups too, or find
their connections closed; both end up in :func:`guarded`, which raises what the failed rank has raised.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_multigpu._lightning_internals import EndOfRun
from lightning_multigpu.communication.failure_board import FailureBoard, RankFailedError, RankFailure
from lightning_multigpu.communication.rendezvous import RendezvousError
from lightning_multigpu.guardian.hang.last_waits import shortened
from lightning_multigpu.guardian.interrupts import WAS_INTERRUPTED, WAS_TERMINATED
from lightning_multigpu.guardian.proc import ended_text

if TYPE_CHECKING:
    from lightning_multigpu.guardian import Failure
    from lightning_multigpu.runtime.process_groups import ProcessGroups
    from lightning_multigpu.runtime.watching import Watching
    from lightning_multigpu.strategies.base import MultiGPUStrategy

log = logging.getLogger(__name__)

_POLL_S = 0.25
_SETTLE_S = 3.0
SIGTERM_STATUS = 128 + signal.SIGTERM  # as a shell reports the end by a signal
_CONNECTION_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket|gloo|nccl|timed out|timeout|abort", re.IGNORECASE
)


class FailureWatch:
    """This rank's part in ending a job whose ranks fail.

    Args:
        timeout_s: how long after a failure this process may take to end by itself before it is ended.

    Attributes:
        failed: whether this run has failed.
        earlier_children: processes that an earlier run in this one has started, by their ranks: this run needs them.
        watching: this rank's connection to the guardian of its host. Without it (guardians need Linux) only exceptions
            and the death of other ranks than 0 are told, and none while the ranks join.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.failed = False
        self._lasts = self._ends_in_order = False
        self._poll: Callable[[], None] = lambda: None
        self._follow: Callable[[str], None] = lambda what: None
        self._board: FailureBoard | None = None
        self._cut: Callable[[], object] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._dead_child: RankFailure | None = None
        self.watching: Watching | None = None
        self.earlier_children: dict[int, subprocess.Popen[bytes]] = {}

    def begin(self, cut: Callable[[], object]) -> None:
        """A new run begins, whose ranks have yet to join; ``cut`` ends what they wait in meanwhile."""
        self.failed = self._ends_in_order = False
        self._dead_child = None
        self._board = None
        self._cut = cut

    def start(
        self,
        board: FailureBoard,
        groups: ProcessGroups,
        *,
        poll: Callable[[], None] = lambda: None,
        follow: Callable[[str], None] = lambda what: None,
    ) -> None:
        """The ranks have joined; ``groups`` are cut when a rank fails, so that nobody waits in them.

        ``poll`` is called several times a second, and ``follow`` with what another rank says of its end; both in other
        threads.

        Raises:
            RankFailedError: one has failed meanwhile.
        """
        self._poll, self._follow = poll, follow
        self._cut = groups.cut
        self._board = board
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, args=(board.watcher(), self._stop), name="failure-watch", daemon=True
        )
        self._thread.start()
        self.check()

    def check(self) -> None:
        """Raises RankFailedError if another rank is known to have failed, or to have ended since an earlier run."""
        if self._dead_child is not None:
            raise RankFailedError(self._dead_child.describe())
        for rank, child in self.earlier_children.items():
            code = child.poll()
            if code is not None:
                raise RankFailedError(
                    f"rank {rank} (pid {child.pid}), which an earlier run of this program has started, "
                    f"{ended_text(code)}; a rank that fails ends its program: start the job anew"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return FailureWatch, (self.timeout_s,)  # what a spawned rank starts from

    def stop(self) -> None:
        """Ends the watch; no failure is noticed from here on."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=0.5 if self.failed else 5)  # it may wait for a host that is gone
        self._thread = None
        if not self.failed:
            self._board = None
        watching, self.watching = self.watching, None
        if watching is not None:
            watching.end()
        self._cut = None

    def last(self) -> None:
        """Lets the watch go on at :meth:`leave` unless the rank has failed: hooks follow, and :meth:`finish`."""
        self._lasts = True

    def leave(self) -> None:
        """The strategy is torn down."""
        if self.failed or not self._lasts:
            self.stop()

    def finish(self) -> None:
        """The run has ended well for this rank: waits until it has for all.

        Raises:
            RankFailedError: it has not; :meth:`settle` finds out what has happened.
        """
        board, watching = self._board, self.watching
        failure = None if board is None or watching is None else watching.finish(board.world_size)
        if failure is not None:
            raise RankFailedError(failure.describe())
        self._lasts = False
        self.stop()

    def end_in_order(self) -> None:
        """All ranks end together, at a signal or when a Tuner has what it wanted: what follows is no failure."""
        self._lasts = False
        self._ends_in_order = True

    def report_to(self, directory: str, node_rank: int | None) -> None:
        """Sets where a file about a failure is left; a directory that is not local is no place for one."""
        if self.watching is not None and "://" not in directory:
            self.watching.report_to(directory, node_rank)

    def child_ended(self, rank: int, pid: int, exit_code: int) -> None:
        """A process that this one has started as a rank has ended, with an exit code as ``Popen.returncode``."""
        if self.watching is not None:
            self.watching.child_ended(rank, exit_code)
        elif exit_code != 0:
            self._child_died(rank, pid, ended_text(exit_code))

    def _child_died(self, rank: int, pid: int, what: str) -> None:
        """A process of this host has ended without leaving word; ends this one too if it cannot do so itself."""
        time.sleep(2 * _POLL_S)  # a rank that raised has left word before its process ended
        if self._ends_in_order:
            return
        failure = RankFailure(
            rank=rank, host=os.uname().nodename, pid=pid, step=None, what=what, traceback="", pickled=None
        )
        self._dead_child = failure
        board = self._board
        if board is not None:
            with contextlib.suppress(RuntimeError):
                self._dead_child = board.report(failure)
        stop = self._stop
        self._abort()
        self._end_process_after_timeout(stop)

    def completed(self, step: int) -> None:
        """Notes how many optimizer steps are done."""
        if self.watching is not None:
            self.watching.completed(step)

    def shown(self) -> None:
        """This process shows the failure in its terminal, so that nobody else has to."""
        if self.watching is not None:
            self.watching.shown()

    def seen_by_guardian(self, failure: Failure) -> None:
        """A guardian tells of a failure elsewhere; called in a thread of its own."""
        what = RankFailure(failure.rank, failure.host, failure.pid, failure.step, failure.what, failure.traceback)
        self._dead_child = self._dead_child or what
        if not self.failed:
            self._follow(failure.what)
        self._abort()

    @property
    def waited(self) -> list[str]:
        """What ranks of this host were waiting in when the job failed, as its guardian has seen it; a line a rank."""
        return [] if self.watching is None else self.watching.waited

    def settle(self, error: BaseException, step: int | None, rank: int | None = None) -> RankFailure | None:
        """Finds out which rank's failure stands behind ``error``; leaves word if it is this one's.

        Args:
            error: that has reached the launcher of this rank.
            step: optimizer steps completed, or None.
            rank: this one, for a failure before the ranks have joined.

        Returns:
            The failure of another rank, or None if ``error`` is this rank's own.
        """
        self.failed = True
        self._lasts = False
        _limit_exit(self.timeout_s, from_exit=not isinstance(error, Exception))
        board = self._board
        if board is None:
            return self._settle_while_joining(error, rank)
        first = self._first(board)
        deadline = time.monotonic() + _SETTLE_S
        while first is None and _is_connection_loss(error) and time.monotonic() < deadline:
            time.sleep(0.05)
            first = self._first(board)
        own = RankFailure.of(error, rank=board.rank, step=step)
        if first is None:
            # The board first: only there the exception itself can be had, and others look as soon as guardians tell.
            if not isinstance(error, RendezvousError):
                error.add_note(own.summary())
            with contextlib.suppress(RuntimeError):
                first = board.report(own)
            if self.watching is not None:
                self.watching.failed(_what(error, own), step=step, traceback=own.traceback)
        self._stop.set()
        self._abort()
        if not self._is_beyond_board(first):
            if board.rank != 0:
                with contextlib.suppress(RuntimeError):
                    board.acknowledge()
            self._await_readers(board)
        is_own = first is None or first.rank == board.rank or isinstance(error, RendezvousError)
        return None if is_own else first

    def _settle_while_joining(self, error: BaseException, rank: int | None) -> RankFailure | None:
        """There is no board yet: only the guardian tells of others."""
        if self._dead_child is None and self.watching is not None:
            own = RankFailure.of(error, rank=rank, step=None)
            if isinstance(error, Exception) and not isinstance(error, RendezvousError):
                error.add_note(own.summary())
            # Where an interrupt has struck says nothing about what was wrong.
            where = own.traceback if isinstance(error, Exception) else ""
            self.watching.failed(_what(error, own), step=None, traceback=where)
        # That the ranks cannot join is raised by each of them for itself.
        return None if isinstance(error, RendezvousError) else self._dead_child

    def _is_beyond_board(self, failure: RankFailure | None) -> bool:
        """Whether a process, a host or a link has failed, and not Python code.

        The guardians then tell everybody all that is known, and rank 0's board may be out of reach: asking it could
        take a minute.
        """
        return self.watching is not None and failure is not None and not failure.traceback

    def _first(self, board: FailureBoard) -> RankFailure | None:
        if self._is_beyond_board(self._dead_child):
            return self._dead_child
        try:
            return board.first() or self._dead_child
        except RuntimeError:
            return self._dead_child

    def _await_readers(self, board: FailureBoard) -> None:
        """Rank 0 keeps the board: it stays until the others have read it, or for a few seconds."""
        if board.rank != 0:
            return
        deadline = time.monotonic() + min(_SETTLE_S, self.timeout_s)
        with contextlib.suppress(RuntimeError):
            while board.acknowledged() < board.world_size - 1 and time.monotonic() < deadline:
                time.sleep(0.05)

    def _watch(self, board: FailureBoard, stop: threading.Event) -> None:
        while not stop.wait(_POLL_S):
            self._poll()
            if self.watching is not None:
                continue  # the guardian tells; asking a rank 0 that is stopped would take until its end
            try:
                failure = board.first()
            except RuntimeError:
                failure = RankFailure(0, "unknown", None, None, "is gone", "", None)
            if failure is not None and failure.rank != board.rank:
                if stop.wait(_POLL_S):
                    return
                self._dead_child = self._dead_child or failure
                self._abort()
                self._end_process_after_timeout(stop)
                return

    def _abort(self) -> None:
        cut, self._cut = self._cut, None
        if cut is not None:
            cut()

    def _end_process_after_timeout(self, stop: threading.Event) -> None:
        """The last resort for a main thread that neither computes Python nor waits in one of our groups."""
        if stop.wait(self.timeout_s):
            return
        failure = self._dead_child
        what = "another rank failed" if failure is None else failure.describe()
        sys.stderr.write(f"{what}\nThis process did not end within {self.timeout_s:g} s of that, so it is ended now.\n")
        sys.stderr.flush()
        os._exit(1)


def guarded(function: Callable[..., Any], strategy: MultiGPUStrategy, args: Any, kwargs: Any) -> Any:
    """Runs a rank's work; if it fails, raises what made the job fail, whichever rank that was.

    The first rank of each host raises the failed rank's exception, so that it is what the terminal shows last; other
    ranks end with exit status 1 and one line in the log.
    """
    watch = strategy.failure_watch
    watch.last()
    try:
        result = function(*args, **kwargs)
        watch.finish()
        return result
    except BaseException as error:
        if isinstance(error, SIGTERMException):
            error.code = SIGTERM_STATUS  # Lightning's has none, so that the process would seem to have done its work
        if strategy.signals.agreed_on(error) or isinstance(error, EndOfRun):
            watch.end_in_order()
            raise
        failure = watch.settle(error, strategy.steps_completed(), strategy.global_rank)
        if failure is None or not isinstance(error, Exception):
            watch.shown()
            _show_waits(watch.waited)
            raise
        if strategy.local_rank == 0:
            watch.shown()
            _show_waits(watch.waited)
            raise failure.exception() from None
        log.info("Rank %d ends because %s", strategy.global_rank, failure.describe())
        raise SystemExit(1) from None


def _show_waits(lines: list[str]) -> None:
    """Before the exception, which is to be the last word."""
    sys.stderr.write("".join(f"Meanwhile {line}\n" for line in shortened(lines)))


def _limit_exit(timeout_s: float, *, from_exit: bool) -> None:
    """Sees to it that a process of a failed job, once it exits, does so in time.

    Then the guardian does not watch any more, and threads of a back end can wait for hosts that are gone. A program
    that goes on after the failure is left in peace until it exits. With ``from_exit`` the time begins there: what was
    told to end by a signal may have saved until then, and ends in order.
    """
    failed_s = time.monotonic()

    def end() -> None:
        left_s = timeout_s if from_exit else failed_s + timeout_s - time.monotonic()
        # The default action needs no Python, which may have gone when the time is over.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, left_s if left_s > 0 else timeout_s)
        gc.freeze()  # the interpreter's last collections take seconds on a busy machine, and are of no use here

    if hasattr(signal, "setitimer"):
        atexit.register(end)


def _what(error: BaseException, failure: RankFailure) -> str:
    ended_by = {KeyboardInterrupt: WAS_INTERRUPTED, SIGTERMException: WAS_TERMINATED}
    return ended_by.get(type(error), failure.what)


def _is_connection_loss(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and bool(_CONNECTION_LOST.search(str(error)))


__all__ = ["FailureWatch", "RankFailedError", "guarded"]
