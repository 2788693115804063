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
_HAS_FAILED = "_lightning_multigpu_has_failed"


@dataclass
class Exit:
    """The exit of this process. After a failed run it takes ``timeout_s`` at most.

    Attributes:
        is_limited: a signal ends the program, or nobody has caught an exception since the failed run.
        is_printed: the guardian has printed the failure.
    """

    timeout_s: float | None = None
    until_s: float = 0.0
    is_limited: bool = False
    is_printed: bool = False

    def after(self, error: BaseException, timeout_s: float) -> None:
        """Limits the exit of a failed run, if nobody catches ``error`` or what is raised later."""
        self.is_limited = not isinstance(error, Exception)  # which no hook sees; callbacks may save for long
        self.timeout_s, self.until_s = timeout_s, 0.0 if self.is_limited else time.monotonic() + timeout_s
        with contextlib.suppress(AttributeError):  # a class with slots
            setattr(error, _HAS_FAILED, True)
        before = sys.excepthook
        if getattr(before, "__module__", "") == __name__:
            return

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            is_printed = self.is_printed and getattr(error, _HAS_FAILED, False)
            try:  # a program's own hook may do more than print
                with contextlib.redirect_stderr(io.StringIO()) if is_printed else contextlib.nullcontext():
                    before(kind, error, trace)
            finally:
                self.is_limited = True

        sys.excepthook = hook

    def forget(self) -> None:
        """The program has gone on to a further run."""
        self.timeout_s, self.is_limited, self.is_printed = None, False, False

    def begin(self) -> None:
        """Limits the time of the exit, which begins now."""
        if self.timeout_s is not None and self.is_limited:
            left_s = self.until_s - time.monotonic()
            # The default action needs no Python: the interpreter may have ended by then.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, left_s if left_s > 0 else self.timeout_s)
            gc.freeze()  # the interpreter's last collections take seconds on a busy machine


EXIT = Exit()
# Python calls functions of atexit after it has joined threads, and this before, as for concurrent.futures.
getattr(threading, "_register_atexit", atexit.register)(EXIT.begin)


def resume_advice(checkpoint: str | None) -> str:
    """The line with the option to resume; empty without a checkpoint that stays."""
    if not checkpoint or os.path.basename(checkpoint).startswith("."):  # a temporary file of Lightning
        return ""
    if sys.argv[0].endswith((PROGRAM, f"lightning_multigpu{os.sep}__main__.py")):
        return f"Resume with {PROGRAM} fit --resume={short(checkpoint)}"
    return f"Resume with ckpt_path='{short(checkpoint)}'"
