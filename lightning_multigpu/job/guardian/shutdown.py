"""The end of a failed job on this host: ranks end themselves if they can, else SIGKILL ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from lightning_multigpu.job.guardian.blocking import done_within, no_link
from lightning_multigpu.job.guardian.failure import Failure, closing_lines, folded, host_name
from lightning_multigpu.job.guardian.interrupts import signal_of
from lightning_multigpu.job.guardian.proc import ENDED, STOPPED
from lightning_multigpu.job.guardian.ranks import Ranks, WatchedRank

# The share of failure_timeout_s in which ranks may end themselves; the rest is for the kernel and the message.
OWN_TIME = 0.9
_HURRY_S = 1.0
_WRITE_LIMIT_S = 5


class Shutdown:
    """The last seconds of the ranks at work.

    Args:
        failure: the failure that ends the job.
        since_s: time of the failure, on the guardian's clock.
        timeout_s: seconds after the failure in which every rank has to have ended.

    Attributes:
        waits: the collectives in which ranks waited at the failure, one line for each rank.
        is_shown: whether the failure was printed in the terminal.
    """

    def __init__(self, failure: Failure, since_s: float, timeout_s: float) -> None:
        self.failure = failure
        self.since_s = since_s
        self._kill_at_s = since_s + OWN_TIME * timeout_s
        self._own_time_s = OWN_TIME * timeout_s
        self._killed: list[WatchedRank] = []
        self.is_shown = False
        self.waits: list[str] = []
        self._wants_file = signal_of(failure.what) is None

    def hurry(self, now_s: float) -> None:
        """Leaves ranks only the time to receive the message: the user has ended the job, and needs no file."""
        self._kill_at_s = min(self._kill_at_s, now_s + _HURRY_S)
        self._wants_file = False

    def is_late(self, now_s: float) -> bool:
        """True once the time in which ranks may end themselves is over."""
        return now_s >= self._kill_at_s

    def progress(self, ranks: Ranks, now_s: float) -> bool:
        """Kills ranks whose time is over; True once no rank is left.

        A stopped rank cannot end itself: it is killed once only stopped ranks are left. The others end first, because a
        terminal shows its prompt when the first rank has ended.
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

    def write(self, path: str | None, ranks: Ranks) -> None:
        """Writes the failure to a file, once; the file of an earlier failure is replaced.

        Args:
            path: the path of the file, or None for no file.
            ranks: the ranks of this host, which the file names with the time: it may be read much later.
        """
        if path is not None and self._wants_file:
            text = _heading(ranks) + self._text(self.failure.traceback)
            done_within(_WRITE_LIMIT_S, lambda: _write_file(path, text))
        self._wants_file = False

    def show(self, ranks: Ranks, *, is_first: bool, has_traceback: bool = False, advice: str = "") -> None:
        """Prints the failure in the terminal, once.

        Args:
            ranks: the ranks of this host.
            is_first: whether this is node 0. Another host prints one line, unless the failed rank is its own.
            has_traceback: whether the failed rank has printed its traceback.
            advice: the last line, or empty.
        """
        if self.is_shown:
            return
        self.is_shown = True
        is_here = ranks.get(self.failure.rank) is not None
        if is_first or is_here or self.failure.rank is None:
            text = self._text(folded(self.failure.traceback) if is_here and not has_traceback else "")
        else:
            text = closing_lines(self.failure, self.waits, in_one=True)[0] + "\n"
        # A pipe that nobody reads must not block the guardian for ever: SIGALRM ends it.
        signal.alarm(_WRITE_LIMIT_S)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error may be closed, or None
            sys.stderr.write(text + (f"{advice}\n" if advice else ""))
            sys.stderr.flush()
        signal.alarm(0)

    def _text(self, traceback: str) -> str:
        """The failed rank's traceback, the killed ranks, the other ranks' collectives and, last, the failure."""
        lines = [traceback.rstrip()] if traceback else []
        others = [rank for rank in self._killed if rank.rank != self.failure.rank]
        if others:
            names = ", ".join(f"{rank.rank} (pid {rank.process.pid})" for rank in others)
            lines.append(
                f"Ended with SIGKILL on {host_name()}, because still there {self._own_time_s:g} s later: rank {names}"
            )
        return "\n".join([*lines, *closing_lines(self.failure, self.waits)]) + "\n"


def _heading(ranks: Ranks) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S %z")
    pids = ", ".join(f"{rank.rank} (pid {rank.process.pid})" for rank in ranks)
    return f"{when}, host {host_name()}, rank {pids}\n"


def _write_file(path: str, text: str) -> None:
    directory, name = os.path.split(path)
    partial = os.path.join(directory, f".{name}.{os.getpid()}")
    try:
        os.makedirs(directory, exist_ok=True)
        with open(partial, "w", encoding="utf-8", errors="replace", opener=no_link) as file:
            file.write(text)
        os.replace(partial, path)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError):
            os.unlink(partial)
        with contextlib.suppress(OSError):
            sys.stderr.write(f"The failure could not be written to {path}: {error}\n")
