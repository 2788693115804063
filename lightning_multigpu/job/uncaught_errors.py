"""Printing of a failed run's uncaught exception.

The exception itself is unchanged, for a program that catches it. Python passes an uncaught one to ``sys.excepthook``;
after a failure this is a function of this module. It prints the failure of the job: with its folded traceback on the
rank that has failed, in one line elsewhere. Other exceptions go to the previous hook, and a hook of the user's own is
not replaced.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from lightning_multigpu.job.checkpoint_files.last_checkpoint import short
from lightning_multigpu.job.guardian import Failure
from lightning_multigpu.job.guardian.failure import closing_lines, folded

PROGRAM = "lightning-multigpu"
_HEADLINE = 200
_MESSAGE = "_lightning_multigpu_message"


@dataclass(frozen=True)
class FailureMessage:
    """The text that this process prints about a failure of the job.

    Attributes:
        failure: the failure.
        in_full: print its traceback; one rank of the job does.
        waited: the collectives in which ranks waited meanwhile, one line for each rank.
        checkpoint: the file to resume from, a function that finds it when the message is printed, or None.
        is_first_host: this is node 0. Other nodes print one line, unless the failed rank is theirs.
        goes_on: whether the job goes on without the failed rank.
        pickled: the exception, for the process that has started this one; empty if it cannot be pickled.
    """

    failure: Failure
    in_full: bool
    waited: list[str]
    checkpoint: str | Callable[[], str | None] | None = None
    is_first_host: bool = True
    goes_on: bool = False
    pickled: bytes = b""

    def __getstate__(self) -> dict[str, Any]:
        # The message is pickled with its exception, which a program may send to another process.
        return {**vars(self), "checkpoint": self.checkpoint if isinstance(self.checkpoint, str) else None}

    def brief(self, *, in_one: bool = False) -> list[str]:
        """The lines that need no exception."""
        return closing_lines(self.failure, self.waited, goes_on=self.goes_on, in_one=in_one)

    def text(self, error: BaseException) -> str:
        """The lines for ``error``: the failure's exception, or one that was raised from it."""
        if not self.in_full and getattr(error, _MESSAGE, None) is self:
            lines = self.brief(in_one=not self.is_first_host)
        else:
            *lines, headline = self.brief()
            if self.in_full and getattr(error, _MESSAGE, None) is self:  # the traceback ends with the text
                raised = self.failure.what.partition(":")[0]
                headline = headline.partition(raised)[0] + raised
            elif len(headline) > _HEADLINE:
                headline = f"{headline[:_HEADLINE].rstrip()}..."
            lines = [headline, *lines, folded(self._traceback_of(error)).rstrip()]
        with contextlib.suppress(Exception):  # a directory that cannot be read must not hide the failure
            lines.append(resume_advice(self.checkpoint() if callable(self.checkpoint) else self.checkpoint))
        return "".join(f"{line}\n" for line in lines if line)

    def _traceback_of(self, error: BaseException) -> str:
        if getattr(error, _MESSAGE, None) is self and self.failure.pid != os.getpid():
            return str(self.failure.traceback)
        found = traceback.TracebackException.from_exception(error)
        found.__notes__ = [note for note in found.__notes__ or () if note != self.failure.summary()]  # the headline
        return "".join(found.format())


def resume_advice(checkpoint: str | None) -> str:
    """The line with the option to resume; empty without a checkpoint that stays."""
    if not checkpoint or os.path.basename(checkpoint).startswith("."):  # a temporary file of Lightning
        return ""
    if sys.argv[0].endswith((PROGRAM, f"lightning_multigpu{os.sep}__main__.py")):
        return f"Resume with {PROGRAM} fit --resume={short(checkpoint)}"
    return f"Resume with ckpt_path='{short(checkpoint)}'"


def show_if_uncaught(error: BaseException, message: FailureMessage) -> None:
    """Makes this process print ``message`` for an uncaught ``error``, or for an exception raised from it."""
    with contextlib.suppress(AttributeError):  # a class with slots
        setattr(error, _MESSAGE, message)
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        found = _message_of(error)
        if found is None:
            before(kind, error, trace)
        else:
            text = found.text(error)
            held: list[int] = []
            if _shows_before_sigterm():  # what comes now waits until the text is out
                signal.signal(signal.SIGTERM, lambda signum, frame: held.append(signum))
            sys.stderr.write(text)
            sys.stderr.flush()
            give_sigterm_back()
            for signum in held:
                os.kill(os.getpid(), signum)
            gc.freeze()  # the interpreter's last collections take seconds on a busy machine

    if _is_pythons_own(before):
        sys.excepthook = show
        _show_before_sigterm(message)


def _show_before_sigterm(message: FailureMessage) -> None:
    """Makes SIGTERM print the message first, while its exception exists: a program that catches it goes on.

    torchrun sends SIGTERM to this rank as soon as another rank has ended; this rank has announced to print the cause.
    """
    # Not the exception, which would keep its frames alive.
    text = "".join(f"{line}\n" for line in message.brief()).encode(errors="replace")

    def show_and_end(signum: int, frame: FrameType | None) -> None:
        give_sigterm_back()
        os.write(2, text)  # sys.stderr may be in the middle of a write
        os.kill(os.getpid(), signum)

    give_sigterm_back()
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, show_and_end)
        weakref.finalize(message, give_sigterm_back, show_and_end).atexit = False


def give_sigterm_back(only_from: Callable[..., None] | None = None) -> None:
    """Restores SIGTERM's default action, if it would print a message: that was printed, or a new run begins."""
    if _shows_before_sigterm() and only_from in (None, signal.getsignal(signal.SIGTERM)):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _shows_before_sigterm() -> bool:
    """Whether SIGTERM has a handler of this module, which this thread may replace."""
    is_ours = getattr(signal.getsignal(signal.SIGTERM), "__module__", None) == __name__
    return is_ours and threading.current_thread() is threading.main_thread()


def _message_of(error: BaseException | None) -> FailureMessage | None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if (found := getattr(error, _MESSAGE, None)) is not None:
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
