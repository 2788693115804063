"""The failure that ends a job, as text that guardians and ranks send each other, and as an exception."""

from __future__ import annotations

import builtins
import contextlib
import os
import traceback
from typing import Any, NamedTuple

MAX_WHAT_CHARS = 2_000
MAX_TRACEBACK_CHARS = 12_000


class RankFailedError(RuntimeError):
    """Another rank of the job has failed. The message names it, and holds its exception's message and traceback."""


class Failure(NamedTuple):
    """The rank that failed, its host, and the cause.

    Attributes:
        what: the predicate of a sentence about the rank: "was ended by SIGKILL", "raised ValueError: no such file".
        rank: the global rank, or None if a guardian, a host or a link has failed.
        host: the name of the host.
        pid: the failed process on its host, or None if there is none.
        step: optimizer steps that the rank had completed, or None if it never said.
        traceback: the traceback of the rank's exception with its notes, or empty.
        error_type: the name of the exception's class if that is one of Python's own, or empty.
        message: the exception's message, for an exception of that class on other ranks.
    """

    what: str
    rank: int | None = None
    host: str = ""
    pid: int | None = None
    step: int | None = None
    traceback: str = ""
    error_type: str = ""
    message: str = ""

    @classmethod
    def of(cls, error: BaseException, *, rank: int | None, step: int | None) -> Failure:
        """The failure of this process by ``error``."""
        kind, text = type(error), str(error)
        # str() of a KeyError is the quoted key, which another KeyError would quote again.
        is_text = len(error.args) == 1 and isinstance(error.args[0], str)
        return cls(
            what=f"raised {kind.__name__}: {text}" if text else f"raised {kind.__name__}",
            rank=rank,
            host=host_name(),
            pid=os.getpid(),
            step=step,
            traceback="".join(traceback.format_exception(error)),
            error_type=kind.__name__ if kind.__module__ == "builtins" else "",
            message=error.args[0] if is_text else text,
        )

    def exception(self) -> Exception:
        """The exception that this failure of another rank raises here.

        Python's own exceptions come as the same class, with what is known of the failure in a note. In place of all
        other classes comes a :class:`RankFailedError`.
        """
        kind = getattr(builtins, self.error_type, None) if self.error_type else None
        if isinstance(kind, type) and issubclass(kind, Exception):
            with contextlib.suppress(Exception):  # some take more than a message
                error: Exception = kind(self.message)
                error.add_note(f"Raised on another rank: {self.describe()}\n{self.traceback}".rstrip())
                return error
        text = self.describe() if self.rank is not None else f"the job failed: {self.describe()}"
        return RankFailedError(f"{text}\n{self.traceback}".rstrip())

    def describe(self) -> str:
        """One line: "rank 3 (host node7, pid 4242, last completed step 120) was ended by SIGKILL"."""
        known = [
            f"host {self.host}" if self.host else "",
            "" if self.pid is None else f"pid {self.pid}",
            "" if self.step is None else "no step completed" if self.step == 0 else f"last completed step {self.step}",
        ]
        where = ", ".join(text for text in known if text)
        subject = "" if self.rank is None else f"rank {self.rank} "
        return f"{subject}({where}) {self.what}" if subject else f"{self.what} ({where})" if where else self.what

    def summary(self) -> str:
        """As :meth:`describe`, without further lines of a message."""
        return self.describe().partition("\n")[0]

    def to_message(self) -> dict[str, Any]:
        """JSON values, cut to what fits into one message; of a traceback the end is kept."""
        return self._replace(
            what=self.what[:MAX_WHAT_CHARS],
            message=self.message[:MAX_WHAT_CHARS],
            traceback=self.traceback[-MAX_TRACEBACK_CHARS:],
        )._asdict()

    @classmethod
    def from_message(cls, values: Any) -> Failure:
        """The inverse of :meth:`to_message`.

        Raises:
            ValueError: the values are not those of a failure.
        """
        if not isinstance(values, dict):
            raise ValueError(f"a failure is an object with the fields {', '.join(cls._fields)}, not {values!r:.80}")
        numbers = {name: values.get(name) for name in ("rank", "pid", "step")}
        texts = {name: values.get(name, "") for name in ("what", "host", "traceback", "error_type", "message")}
        for name, value in {**numbers, **texts}.items():
            wanted: tuple[type, ...] = (int, type(None)) if name in numbers else (str,)
            if not isinstance(value, wanted):
                raise ValueError(f"the field {name} of a failure is {value!r:.80}; it must be {wanted[0].__name__}")
        return cls(**numbers, **texts)  # type: ignore[arg-type]


def host_name() -> str:
    """The name of this host, as its kernel has it."""
    return os.uname().nodename
