"""The exit of a process whose run has failed, if nobody catches the exception.

The guardian prints the failure when all ranks have left the run. So ``sys.excepthook`` prints nothing of the exception,
which is unchanged for a program that catches it. From then on the time of the exit is limited: threads, of the program
or of a back end, can wait for hosts that have ended.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from types import TracebackType

from lightning_multigpu.job.checkpoint_files.last_checkpoint import short

PROGRAM = "lightning-multigpu"
_EXIT = "_lightning_multigpu_exit"


@dataclass(eq=False)
class FailedExit:
    """The exit after a failure: within ``timeout_s`` after ``since_s`` (monotonic), if nobody catches the exception.

    Attributes:
        is_printed: the guardian has printed the failure.
    """

    timeout_s: float
    since_s: float
    is_printed: bool = False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # It is pickled with its exception, which a program may send to another process.
        return type(None), ()


def exit_after(error: BaseException, failed: FailedExit) -> None:
    """Makes ``failed`` the exit of this process after ``error``, or after an exception that is raised from it."""
    with contextlib.suppress(AttributeError):  # a class with slots
        setattr(error, _EXIT, failed)
    before = sys.excepthook
    if getattr(before, "__module__", "") == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        found: FailedExit | None = getattr(error, _EXIT, None)
        is_printed = found is not None and found.is_printed
        try:  # a program's own hook may do more than print
            with contextlib.redirect_stderr(io.StringIO()) if is_printed else contextlib.nullcontext():
                before(kind, error, trace)
        finally:
            cause, seen = error.__cause__ or error.__context__, {id(error)}
            while found is None and cause is not None and id(cause) not in seen:
                found = getattr(cause, _EXIT, None)
                seen.add(id(cause))
                cause = cause.__cause__ or cause.__context__
            if found is not None:
                limit_exit(found.timeout_s, found.since_s)

    sys.excepthook = hook


def resume_advice(checkpoint: str | None) -> str:
    """The line with the option to resume; empty without a checkpoint that stays."""
    if not checkpoint or os.path.basename(checkpoint).startswith("."):  # a temporary file of Lightning
        return ""
    if sys.argv[0].endswith((PROGRAM, f"lightning_multigpu{os.sep}__main__.py")):
        return f"Resume with {PROGRAM} fit --resume={short(checkpoint)}"
    return f"Resume with ckpt_path='{short(checkpoint)}'"


def limit_exit(timeout_s: float, since_s: float) -> None:
    """Ends this process, which is about to exit, ``timeout_s`` after ``since_s``, or from now if that is over."""
    left_s = since_s + timeout_s - time.monotonic()
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
        limit_exit(timeout_s, time.monotonic())


# Python calls functions of atexit after it has joined threads, and this before, as for concurrent.futures.
getattr(threading, "_register_atexit", atexit.register)(_begin_exit)
