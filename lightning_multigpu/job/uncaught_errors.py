"""Printing of a failed run's uncaught exception.

The exception itself is unchanged, for a program that catches it. Python passes an uncaught one to ``sys.excepthook``;
after a failure this is a function of this module. It prints the folded traceback on the rank that has failed, and has
the guardian print the failure of the job. Other exceptions go to the previous hook; a user's own hook prints all. From
then on the time of the exit is limited: threads, of the program or of a back end, can wait for hosts that have ended.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import inspect
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from lightning_multigpu.job.checkpoint_files.last_checkpoint import short
from lightning_multigpu.job.guardian import Failure
from lightning_multigpu.job.guardian.failure import closing_lines, folded

PROGRAM = "lightning-multigpu"
_REPORT = "_lightning_multigpu_report"


@dataclass(eq=False)
class FailureReport:
    """What this process prints if a program does not catch the exception of a failure.

    Attributes:
        in_full: print its traceback; one rank of the job does.
        print_failure: prints the failure, and the line that it is given; returns False if it cannot. None if the
            failure is printed already.
        checkpoint: finds the file to resume from when the failure is printed; None for no such line.
        limit_exit: limits the time of the exit that follows.
    """

    failure: Failure
    in_full: bool
    print_failure: Callable[[str], bool] | None = None
    checkpoint: Callable[[], str | None] | None = None
    limit_exit: Callable[[], None] = lambda: None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # It is pickled with its exception, which a program may send to another process.
        return type(None), ()

    def print(self, error: BaseException) -> None:
        """Prints ``error``, the failure's exception or one that was raised from it, and the failure."""
        sys.stderr.write(self._traceback(error))
        sys.stderr.flush()
        advice = ""
        with contextlib.suppress(Exception):  # a directory that cannot be read must not hide the failure
            advice = resume_advice(self.checkpoint() if self.checkpoint is not None else None)
        if self.print_failure is None or not self.print_failure(advice):
            lines = [] if self.print_failure is None else closing_lines(self.failure, [])
            sys.stderr.write("".join(f"{line}\n" for line in [*lines, advice] if line))

    def _traceback(self, error: BaseException) -> str:
        is_failures = getattr(error, _REPORT, None) is self
        is_own = self.failure.pid == os.getpid() and bool(self.failure.traceback)
        if is_failures and not is_own:
            return f"{folded(self.failure.traceback).rstrip()}\n" if self.in_full else ""
        found = traceback.TracebackException.from_exception(error)
        found.__notes__ = [note for note in found.__notes__ or () if note != self.failure.describe()]  # the last line
        return f"{folded(''.join(found.format())).rstrip()}\n"


def is_reported(error: BaseException) -> bool:
    """Whether ``error`` has a report, by which it prints the failure."""
    return getattr(error, _REPORT, None) is not None


def resume_advice(checkpoint: str | None) -> str:
    """The line with the option to resume; empty without a checkpoint that stays."""
    if not checkpoint or os.path.basename(checkpoint).startswith("."):  # a temporary file of Lightning
        return ""
    if sys.argv[0].endswith((PROGRAM, f"lightning_multigpu{os.sep}__main__.py")):
        return f"Resume with {PROGRAM} fit --resume={short(checkpoint)}"
    return f"Resume with ckpt_path='{short(checkpoint)}'"


def print_if_uncaught(error: BaseException, report: FailureReport) -> None:
    """Makes this process print ``report`` for an uncaught ``error``, or for an exception raised from it."""
    with contextlib.suppress(AttributeError):  # a class with slots
        setattr(error, _REPORT, report)
    before = sys.excepthook
    if getattr(before, "__module__", "") == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        found = _report_of(error)
        try:
            if found is None or not _is_pythons_own(before):
                before(kind, error, trace)
            else:
                found.print(error)
        finally:
            if found is not None:
                found.limit_exit()

    sys.excepthook = hook


def limit_exit(timeout_s: float, since_s: float | None = None) -> None:
    """Ends this process, which is about to exit, ``timeout_s`` from now, or after ``since_s`` if that is to come."""
    left_s = 0.0 if since_s is None else since_s + timeout_s - time.monotonic()
    # The default action needs no Python: the interpreter may have ended by then.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, left_s if left_s > 0 else timeout_s)
    gc.freeze()  # the interpreter's last collections take seconds on a busy machine


def limit_later_exit(timeout_s: float | None) -> None:
    """Limits the time of this process's exit, from its beginning: a signal ends the program, and no hook sees that.

    None takes the limit back: the program has gone on to a further run.
    """
    _LATER_S[:] = [] if timeout_s is None else [timeout_s]


_LATER_S: list[float] = []


def _begin_exit() -> None:
    for timeout_s in _LATER_S:
        limit_exit(timeout_s)


# Python calls functions of atexit after it has joined threads, and this before, as for concurrent.futures.
getattr(threading, "_register_atexit", atexit.register)(_begin_exit)


def _report_of(error: BaseException | None) -> FailureReport | None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if (found := getattr(error, _REPORT, None)) is not None:
            return found  # type: ignore[no-any-return]
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def _is_pythons_own(hook: Any) -> bool:
    """False if the user's program has a hook of its own; torch wraps hooks to name the rank in each line."""
    while getattr(hook, "__module__", "").startswith(("torch.", "lightning_multigpu.")):
        around = inspect.getclosurevars(hook).nonlocals
        hook = around.get("old_hook") or around.get("before") or sys.__excepthook__
    return hook is sys.__excepthook__
