"""The end of a failed job on this host: ranks end themselves if they can, else SIGKILL ends them."""

from __future__ import annotations

import time

from lightning_multigpu.job.guardian.blocking import append, print_text
from lightning_multigpu.job.guardian.failure import Failure, closing_lines, folded, host_name
from lightning_multigpu.job.guardian.interrupts import signal_of
from lightning_multigpu.job.guardian.proc import ENDED, STOPPED
from lightning_multigpu.job.guardian.ranks import Ranks, WatchedRank

# The share of failure_timeout_s in which ranks may end themselves; the rest is for the kernel and the message.
OWN_TIME = 0.9
_HURRY_S = 1.0
_LIMIT_S = 5.0


class Shutdown:
    """The last seconds of the ranks at work, which have to have ended ``timeout_s`` after the failure.

    ``waits`` are the collectives in which ranks waited at the failure, one line for each rank.
    """

    def __init__(self, failure: Failure, since_s: float, timeout_s: float) -> None:
        self.failure = failure
        self.since_s = since_s
        self._kill_at_s = since_s + OWN_TIME * timeout_s
        self._own_time_s = OWN_TIME * timeout_s
        self._killed: list[WatchedRank] = []
        self.is_printed = False
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
        """Appends the failure to a file, once, with the time and the ranks of this host: it may be read much later."""
        if path is not None and self._wants_file:
            when = time.strftime("%Y-%m-%d %H:%M:%S %z")
            pids = ", ".join(f"{rank.rank} (pid {rank.process.pid})" for rank in ranks)
            text = f"{when}, host {host_name()}, rank {pids}\n{self._text(self.failure.traceback)}"
            append(path, text, "The failure", limit_s=_LIMIT_S)
        self._wants_file = False

    def print(self, ranks: Ranks, *, has_traceback: bool = False, advice: str = "") -> None:
        """Prints the failure in the terminal, once.

        ``has_traceback``: the failed rank has printed its traceback. ``advice`` is the last line.
        """
        if self.is_printed:
            return
        self.is_printed = True
        is_here = ranks.get(self.failure.rank) is not None
        text = self._text(folded(self.failure.traceback) if is_here and not has_traceback else "")
        print_text(text + (f"{advice}\n" if advice else ""), limit_s=_LIMIT_S)

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
