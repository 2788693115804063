"""How a job that has failed ends on this host: ranks by themselves if they can, and by SIGKILL if not."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from lightning_multigpu.guardian.failure import Failure, host_name
from lightning_multigpu.guardian.proc import ENDED, STOPPED
from lightning_multigpu.guardian.ranks import Ranks, WatchedRank

# Of failure_timeout_s, what ranks have to end by themselves; the rest is for the kernel and for the message.
_OWN_TIME = 0.9
_WRITE_LIMIT_S = 5


class Ending:
    """The last seconds of the ranks at work.

    Args:
        failure: why.
        since_s: when that came about, on the guardian's clock.
        timeout_s: how long after that every rank has to have ended.
    """

    def __init__(self, failure: Failure, since_s: float, timeout_s: float) -> None:
        self.failure = failure
        self.since_s = since_s
        self._kill_at_s = since_s + _OWN_TIME * timeout_s
        self._own_time_s = _OWN_TIME * timeout_s
        self._killed: list[WatchedRank] = []
        self._announced: WatchedRank | None = None

    def announce(self, rank: WatchedRank) -> None:
        """``rank`` shows the failure in this host's terminal itself, if it lives to do so."""
        self._announced = rank

    def is_late(self, now_s: float) -> bool:
        """Whether the time that ranks have to end by themselves is over."""
        return now_s >= self._kill_at_s

    def progress(self, ranks: Ranks, now_s: float) -> bool:
        """Kills who has had time enough; True once no rank is left.

        A stopped rank goes as soon as only stopped ones are left: it cannot end by itself. The others first, because
        a terminal shows its prompt when the first rank has ended.
        """
        states = {rank.rank: rank.process.state() for rank in ranks.at_work}
        left = [rank for rank in ranks.at_work if states[rank.rank] != ENDED]
        only_stopped = all(states[rank.rank] == STOPPED for rank in left)
        if left and (only_stopped or now_s >= self._kill_at_s):
            for rank in left:
                if rank not in self._killed:
                    self._killed.append(rank)
                    rank.process.kill()
        return not left

    def report(self, directory: str | None) -> None:
        """Writes the failure to a file, and to the terminal unless a rank has done so."""
        text = self.text()
        if directory is not None:
            self._write_file(directory, text)
        if self._announced is not None and self._announced not in self._killed:
            return
        if sys.stderr is None:
            return
        # A pipe that nobody reads must not keep the guardian for ever: the default of SIGALRM ends it.
        signal.alarm(_WRITE_LIMIT_S)
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()
        signal.alarm(0)

    def text(self) -> str:
        """The message: the failed rank's traceback, whom the guardian had to end, and, last, what happened."""
        lines = [self.failure.traceback.rstrip()] if self.failure.traceback else []
        others = [rank for rank in self._killed if rank.rank != self.failure.rank]
        if others:
            names = ", ".join(f"{rank.rank} (pid {rank.process.pid})" for rank in others)
            lines.append(
                f"Ended with SIGKILL on {host_name()}, because still there {self._own_time_s:g} s later: rank {names}"
            )
        lines.append(f"The job failed: {self.failure.describe()}")
        return "\n".join(lines) + "\n"

    def _write_file(self, directory: str, text: str) -> None:
        """Each host has a file of its own: the directory may be one that all of them see."""
        name = f"failure-{host_name()}.txt"
        path, partial = os.path.join(directory, name), os.path.join(directory, f".{name}.{os.getpid()}")
        try:
            os.makedirs(directory, exist_ok=True)
            with open(partial, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
            os.replace(partial, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            with contextlib.suppress(OSError):
                sys.stderr.write(f"The failure could not be written to {path}: {error}\n")
