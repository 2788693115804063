"""The end of a failed job on this host: ranks end themselves if they can, else SIGKILL ends them."""

from __future__ import annotations

from lightning_multigpu.job.guardian.blocking import print_text
from lightning_multigpu.job.guardian.failure import Failure, closing_lines, folded
from lightning_multigpu.job.guardian.proc import ENDED, STOPPED
from lightning_multigpu.job.guardian.ranks import Ranks

# The share of failure_timeout_s in which ranks may end themselves; the rest is for the kernel and the message.
OWN_TIME = 0.9
_HURRY_S = 1.0
_LIMIT_S = 5.0


class Shutdown:
    """The last seconds of the ranks at work, which have to have ended ``timeout_s`` after the failure.

    ``waits`` are the collectives in which ranks waited at the failure, one line for each rank.
    """

    def __init__(self, failure: Failure, since_s: float, timeout_s: float, waits: list[str]) -> None:
        self.failure, self.waits = failure, waits
        self._kill_at_s = since_s + OWN_TIME * timeout_s
        self.is_printed = False

    def hurry(self, now_s: float) -> None:
        """Leaves ranks only the time to receive the message: the user has ended the job."""
        self._kill_at_s = min(self._kill_at_s, now_s + _HURRY_S)

    def is_late(self, now_s: float) -> bool:
        """True once the time in which ranks may end themselves is over."""
        return now_s >= self._kill_at_s

    def progress(self, ranks: Ranks, now_s: float) -> bool:
        """Kills ranks whose time is over; True once no rank is left.

        A stopped rank cannot end itself: it is killed once only stopped ranks are left. The others end first, because a
        terminal shows its prompt when the first rank has ended.
        """
        states = {rank: rank.process.state() for rank in ranks.at_work}
        left = [rank for rank, state in states.items() if state != ENDED]
        if self.is_late(now_s) or all(states[rank] == STOPPED for rank in left):
            for rank in left:
                rank.process.kill()
        return not left

    def print(self, ranks: Ranks, *, has_traceback: bool = False, advice: str = "") -> None:
        """Prints the failure in the terminal, once: the traceback, the other ranks' collectives, and one line.

        ``has_traceback``: the failed rank has printed its traceback. ``advice`` is the last line.
        """
        if self.is_printed:
            return
        self.is_printed = True
        is_here = ranks.get(self.failure.rank) is not None
        lines = [folded(self.failure.traceback).rstrip()] if is_here and not has_traceback else []
        lines += [*closing_lines(self.failure, self.waits), advice]
        print_text("".join(f"{line}\n" for line in lines if line), limit_s=_LIMIT_S)
