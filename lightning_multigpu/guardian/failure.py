"""What is known of the failure that ends a job."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

MAX_WHAT_CHARS = 2_000
MAX_TRACEBACK_CHARS = 12_000


class Failure(NamedTuple):
    """Who failed, where, and how.

    Attributes:
        what: goes on after the rank's name: "was ended by SIGKILL".
        rank: the global rank, or None where it is not a rank that failed but a guardian, a host or a link.
        host: the name of the host.
        pid: of the failed process on its host, or None if there is none.
        step: optimizer steps that the rank had completed, or None if it never said.
        traceback: of the rank's exception, or empty.
    """

    what: str
    rank: int | None = None
    host: str = ""
    pid: int | None = None
    step: int | None = None
    traceback: str = ""

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

    def to_message(self) -> dict[str, Any]:
        """JSON values, cut to what fits into one message; of a traceback the end is kept."""
        short = self._replace(what=self.what[:MAX_WHAT_CHARS], traceback=self.traceback[-MAX_TRACEBACK_CHARS:])
        return short._asdict()

    @classmethod
    def from_message(cls, values: Any) -> Failure:
        """The inverse of :meth:`to_message`.

        Raises:
            ValueError: the values are not those of a failure.
        """
        if not isinstance(values, dict):
            raise ValueError(f"a failure is an object with the fields {', '.join(cls._fields)}, not {values!r:.80}")
        numbers = {name: values.get(name) for name in ("rank", "pid", "step")}
        texts = {name: values.get(name, "") for name in ("what", "host", "traceback")}
        for name, value in {**numbers, **texts}.items():
            wanted: tuple[type, ...] = (int, type(None)) if name in numbers else (str,)
            if not isinstance(value, wanted):
                raise ValueError(f"the field {name} of a failure is {value!r:.80}; it must be {wanted[0].__name__}")
        return cls(**numbers, **texts)  # type: ignore[arg-type]


def host_name() -> str:
    """The name of this host, as its kernel has it."""
    return os.uname().nodename
