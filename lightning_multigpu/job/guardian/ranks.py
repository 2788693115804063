"""The ranks of a host, and failures that the states of their processes show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lightning_multigpu.job.guardian.failure import Failure, host_name
from lightning_multigpu.job.guardian.proc import ENDED, RUNNING, STOPPED, WatchedProcess, ended_text

_PARENT_REPORT_S = 1.0


class Found(NamedTuple):
    """A failure, and its time."""

    failure: Failure
    since_s: float


class OwnError(NamedTuple):
    """An exception of a rank: its class and step, the failure to report if not all ranks raise it, and the time."""

    key: str
    failure: Failure
    since_s: float


class WatchedRank:
    """One rank: its process, and the messages that it has sent.

    Attributes:
        slot: the index of the rank's page in the shared memory.
        introduced: the process itself has sent its rank; before, it is the one that the rank's parent has started.
        finished: True while the rank needs no other rank: it rests or has left.
        at_end: True once the rank has reached the end of its run, and waits for the others.
        joining_until_s: the time by which the rank has to join the others; None before and afterwards.
        reported_exit_code: the exit status that the rank's parent has reported.
        lost_since_s: the time at which the job has lost the rank and has gone on; None otherwise.
        error: the exception with which it has reached the end of its run.
        may_print: the rank has raised the job's failure, and asks to print it if its program does not catch it.
        advice: the last line of the failure that it has asked to print; None before.
    """

    def __init__(self, rank: int, process: WatchedProcess, slot: int, *, introduced: bool) -> None:
        self.rank = rank
        self.process = process
        self.slot = slot
        self.introduced = introduced
        self.finished = False
        self.at_end = False
        self.error: OwnError | None = None
        self.joining_until_s: float | None = None
        self.reported_exit_code: int | None = None
        self.can_be_lost = self.has_left = self.may_print = False
        self.advice: str | None = None
        self.lost_since_s: float | None = None
        self.stopped_since_s: float | None = None
        self.ended_since_s: float | None = None

    def failure(self, what: str) -> Failure:
        return Failure(what, rank=self.rank, host=host_name(), pid=self.process.pid)


class Ranks:
    """All ranks of the host that have connected so far, of ``num_ranks``.

    A rank may be stopped for ``stopped_limit_s`` while others are not. ``run`` is the number of the run that ranks have
    begun last; ``others_wait``: ranks on other hosts may wait for those here.
    """

    def __init__(self, num_ranks: int, stopped_limit_s: float) -> None:
        self.num_ranks = num_ranks
        self.stopped_limit_s = stopped_limit_s
        self.run = 1
        self.others_wait = False
        self._ranks: dict[int, WatchedRank] = {}

    def __iter__(self) -> Iterator[WatchedRank]:
        return iter(list(self._ranks.values()))

    def __len__(self) -> int:
        return len(self._ranks)

    def add(self, rank: int, pid: int, *, introduced: bool = True) -> WatchedRank:
        """Watches the process ``pid`` as ``rank``; a process may connect again.

        Before it has ``introduced`` itself, its parent names the process that it has started. That may be a wrapper,
        whose child is the rank.

        Raises:
            ValueError: the rank belongs to another process, or is one too many.
            ProcessLookupError: there is no such process.
        """
        known = self._ranks.get(rank)
        if known is not None and not introduced:
            return known
        if known is not None and (known.introduced or known.process.pid == pid):
            if known.process.pid != pid:
                raise ValueError(
                    f"rank {rank} is the process {known.process.pid} already, and {pid} says that it is rank {rank}; "
                    "give each process a rank of its own"
                )
            known.introduced = True
            known.finished = known.at_end = known.can_be_lost = known.has_left = False
            known.lost_since_s = known.error = None
            return known
        if known is None and len(self._ranks) >= self.num_ranks:
            raise ValueError(
                f"rank {rank} (pid {pid}) is one too many: the guardian was started for {self.num_ranks} ranks and has "
                f"{', '.join(map(str, sorted(self._ranks)))}; start it with num_ranks={self.num_ranks + 1}"
            )
        slot = len(self._ranks) if known is None else known.slot
        self._ranks[rank] = WatchedRank(rank, WatchedProcess(pid), slot, introduced=introduced)
        return self._ranks[rank]

    def begin(self, run: int) -> bool:
        """Begins a further run, to which all ranks have to come; False if it has begun already."""
        if run <= self.run:
            return False
        self.run = run
        for rank in self._ranks.values():
            rank.finished = rank.at_end = rank.can_be_lost = False
            rank.error = None
        return True

    @property
    def resting(self) -> list[WatchedRank]:
        """The ranks between two runs."""
        return [
            rank
            for rank in self._ranks.values()
            if rank.finished and not rank.has_left and rank.process.state() != ENDED
        ]

    def get(self, rank: object) -> WatchedRank | None:
        """The rank, if it has connected."""
        return self._ranks.get(rank) if isinstance(rank, int) else None

    @property
    def at_work(self) -> list[WatchedRank]:
        """The ranks that have not finished."""
        return [rank for rank in self._ranks.values() if not rank.finished]

    @property
    def lost(self) -> list[WatchedRank]:
        """The ranks that the job has lost, and goes on without."""
        return [rank for rank in self._ranks.values() if rank.lost_since_s is not None]

    @property
    def all_at_end(self) -> bool:
        """True once every rank of the host has reached the end of its run."""
        return len(self._ranks) == self.num_ranks and all(rank.at_end for rank in self._ranks.values())

    @property
    def errors(self) -> list[OwnError]:
        """The exceptions with which ranks have reached the end of their run; the first one first."""
        return sorted((rank.error for rank in self._ranks.values() if rank.error), key=lambda each: each.since_s)

    @property
    def end_key(self) -> str | None:
        """What all ranks of the host have reached the end with: one exception, or none (empty). None: they differ."""
        keys = {"" if rank.error is None else rank.error.key for rank in self._ranks.values() if rank.at_end}
        return keys.pop() if len(keys) == 1 else None

    def restart_timers(self) -> None:
        """Restarts the time for which ranks have been stopped: this process was stopped too."""
        for rank in self._ranks.values():
            rank.stopped_since_s = None

    def observe(self, now_s: float) -> Found | None:
        """Looks at all processes; returns the failure that they show, if any, or of one that has not joined in time.

        If several have ended, one that a signal ended comes first: an exit status is more often a consequence.
        """
        found: list[tuple[bool, Found]] = []
        stopped: list[WatchedRank] = []
        for rank in self.at_work:
            state = rank.process.state()
            if state == ENDED:
                exit_code = rank.process.exit_code()
                exit_code = rank.reported_exit_code if exit_code is None else exit_code
                rank.ended_since_s = now_s if rank.ended_since_s is None else rank.ended_since_s
                # Its parent's report of the exit status, and its own last message, may still be under way.
                if exit_code or now_s - rank.ended_since_s > _PARENT_REPORT_S:
                    by_signal = exit_code is not None and exit_code < 0
                    has_joined = rank.introduced and rank.joining_until_s is None
                    when = " in the middle of the run" if has_joined else " before it joined the run"
                    what = ended_text(exit_code) + (when if exit_code == 0 else "")
                    found.append((not by_signal, Found(rank.failure(what), now_s)))
            elif state == STOPPED:
                stopped.append(rank)
                rank.stopped_since_s = now_s if rank.stopped_since_s is None else rank.stopped_since_s
            elif state == RUNNING:
                rank.stopped_since_s = None
        if found:
            return min(found, key=lambda entry: entry[0])[1]
        for rank in self.at_work:
            if rank.joining_until_s is not None and now_s > rank.joining_until_s:
                return Found(rank.failure("has not joined the others in time (join_timeout_s)"), now_s)
        if not self.others_wait and len(stopped) == len(self.at_work):
            self.restart_timers()  # the whole job is suspended, by Ctrl-Z for example: no rank waits
            return None
        for rank in stopped:
            since_s = now_s if rank.stopped_since_s is None else rank.stopped_since_s
            if now_s - since_s > self.stopped_limit_s:
                what = (
                    f"has been stopped by a signal (SIGSTOP, SIGTSTP...) for {now_s - since_s:.1f} s while others wait"
                )
                return Found(rank.failure(what), since_s)
        return None
