"""The failure that ends a job: as text for messages between guardians and ranks, and as an exception."""

from __future__ import annotations

import builtins
import contextlib
import os
from typing import Any, NamedTuple

from lightning_multigpu.job.guardian.frames import Frame, place

TRACEBACK = "LIGHTNING_MULTIGPU_TRACEBACK"
# Characters, which take up to 6 bytes each in JSON; together they must fit into a message.
MAX_WHAT = 4_000
MAX_TRACEBACK = 12_000
_MAX_NAME = 300
_MAX_LINES = 8


class RankFailedError(RuntimeError):
    """A rank in another process has failed. The message contains that rank, its exception's message and traceback."""


class Failure(NamedTuple):
    """The rank that failed, its host, and the cause.

    Attributes:
        what: the predicate of a sentence about the rank: "was ended by SIGKILL", "raised ValueError: no such file".
        rank: the global rank, or None if a guardian, a host or a link has failed.
        host: the name of the host.
        pid: the failed process on its host, or None if there is none.
        step: optimizer steps that the rank had completed, or None if unknown.
        place: the line that has raised the exception; empty without one.
        traceback: the traceback of the rank's exception with its notes, without frames of libraries; or empty.
        error_type: the name of the exception's class, "builtins.ValueError"; empty without an exception.
        message: the exception's message, for an exception of that class on other ranks.
        age_s: for how long it had lasted when it was found.
        signal: the signal on which the rank has ended its run alone, or 0.
    """

    what: str
    rank: int | None = None
    host: str = ""
    pid: int | None = None
    step: int | None = None
    place: str = ""
    traceback: str = ""
    error_type: str = ""
    message: str = ""
    age_s: float = 0.0
    signal: int = 0

    @classmethod
    def of(cls, error: BaseException, *, rank: int | None, step: int | None) -> Failure:
        """The failure of this process by ``error``."""
        import traceback  # by ranks alone: it takes 10 ms of a guardian's start

        kind, text = type(error), text_of(error)
        found = traceback.TracebackException.from_exception(error)
        frames = [Frame(each.filename, each.lineno or 0, each.name) for each in reversed(found.stack)]
        left_out = _leave_out_libraries(found) if os.environ.get(TRACEBACK) != "full" else ""
        if _BEGINS in text:  # a data loader puts the traceback of its worker into its message
            text = f"{text.partition(chr(10))[0]} {text.rstrip().rpartition(chr(10))[2]}"
        # str() of a KeyError is the quoted key, which another KeyError would quote again.
        is_text = len(error.args) == 1 and isinstance(error.args[0], str)
        return cls(
            what=f"raised {kind.__name__}: {text}" if text else f"raised {kind.__name__}",
            rank=rank,
            host=host_name(),
            pid=os.getpid(),
            step=step,
            place=place(frames) if frames else "",
            traceback=left_out + "".join(found.format()).rstrip(),
            error_type=f"{kind.__module__}.{kind.__qualname__}",
            message=error.args[0] if is_text else text_of(error),
        )

    def exception(self) -> Exception:
        """The exception that this failure raises in another process: of its class if that is built-in.

        Exceptions of all other classes become a :class:`RankFailedError`.
        """
        module, _, name = self.error_type.rpartition(".")
        kind = getattr(builtins, name, None) if module == "builtins" else None
        if isinstance(kind, type) and issubclass(kind, Exception):
            with contextlib.suppress(Exception):  # some classes take more than a message
                error: Exception = kind(self.message)
                error.add_note(self.note())
                return error
        text = self.describe() if self.rank is not None else f"the job failed: {self.describe()}"
        return RankFailedError(f"{text}\n{self.traceback}".rstrip())

    def is_alike(self, other: Failure) -> bool:
        """Whether two ranks have raised the same class of exception at the same step and line."""
        mine, others = ((each.error_type, each.step or 0, each.place) for each in (self, other))
        return mine == others

    def note(self) -> str:
        """The note of an exception of this failure in another process."""
        return f"Raised in another process: {self.describe()}\n{self.traceback}".rstrip()

    def describe(self) -> str:
        """One line: "rank 3 (host node7, pid 4242, last completed step 120) was ended by SIGKILL"."""
        known = [
            f"host {self.host}" if self.host else "",
            "" if self.pid is None else f"pid {self.pid}",
            "" if self.step is None else "no step completed" if self.step == 0 else f"last completed step {self.step}",
            f"at {self.place}" if self.place else "",
        ]
        where = ", ".join(text for text in known if text)
        subject = "" if self.rank is None else f"rank {self.rank} "
        text = f"{subject}({where}) {self.what}" if subject else f"{self.what} ({where})" if where else self.what
        return text.partition("\n")[0]

    def to_message(self) -> dict[str, Any]:
        """JSON values for :class:`Failure`, cut to fit into one message; a traceback keeps its end."""
        return self._replace(
            what=self.what[:MAX_WHAT],
            host=self.host[:_MAX_NAME],
            place=self.place[:_MAX_NAME],
            error_type=self.error_type[:_MAX_NAME],
            message=self.message[:MAX_WHAT],
            traceback=self.traceback[-MAX_TRACEBACK:],
        )._asdict()


def closing_lines(failure: Failure, waited: list[str], *, goes_on: bool = False) -> list[str]:
    """The collectives in which ranks waited and, last, the failure; ``goes_on``: the job goes on without the rank."""
    headline = f"The job {'goes on without a rank' if goes_on else 'failed'}: {failure.describe()}"
    return [*(f"Meanwhile {line}" for line in waited[:_MAX_LINES]), headline]


def text_of(error: BaseException) -> str:
    """The exception's message; Python's own words where the ``str()`` of a user's class raises."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


_BEGINS = "Traceback (most recent call last):"


def _leave_out_libraries(found: Any) -> str:
    """Leaves out frames of libraries, but not one that has raised, of an exception and its causes; says how many."""
    number = 0
    while found is not None:
        kept = [each for each in found.stack[:-1] if not Frame(each.filename, 0, "").library] + found.stack[-1:]
        number += len(found.stack) - len(kept)
        found.stack[:] = kept
        found = found.__cause__ or found.__context__
    return f"(Without {number} frames of libraries: {TRACEBACK}=full shows all)\n" * (number > 0)


def host_name() -> str:
    """The name of this host, from its kernel."""
    return os.uname().nodename
