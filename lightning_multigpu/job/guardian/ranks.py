"""The ranks of a host and their workers: failures that the states of their processes show, and their end."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterator

from lightning_multigpu.job.guardian.blocking import print_text
from lightning_multigpu.job.guardian.failure import Failure, closing_lines, host_name
from lightning_multigpu.job.guardian.proc import ENDED, STOPPED, WatchedProcess, ended_text, read_stat

_PARENT_REPORT_S = 1.0
# The share of failure_timeout_s in which ranks may end themselves; the rest is for the kernel and the message.
OWN_TIME = 0.9
_HURRY_S = 1.0
_PRINT_S = 5.0
# Commands of processes that run the rank's own code. Multiprocessing's resource tracker is not among them: it removes
# files of the others, and then ends itself. Neither is a parameter server, which other ranks may still need.
_SPAWNED = (b"multiprocessing.spawn", b"multiprocessing.forkserver")


class Workers:
    """The worker processes of a rank, such as those of data loaders: none outlives it.

    They are its descendants, noted while it runs: afterwards the kernel no longer links them.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._command = rank, b""
        self._noted: dict[int, int] = {}

    def note(self, ranks: Collection[int]) -> None:
        """Notes the workers; the processes ``ranks`` are none."""
        self._command = _command(self._rank) or self._command
        with contextlib.suppress(OSError):  # the kernel cannot answer now: the next round asks again
            # Loaders may start new ones each epoch.
            self._noted = {pid: ticks for pid, ticks in self._noted.items() if _is_alive(pid, ticks)}
            for pid in _descendants(self._rank, ranks):
                stat = read_stat(pid)
                if stat is not None and self._noted.get(pid) != stat.start_ticks and self._is_worker(pid):
                    self._noted[pid] = stat.start_ticks

    def end(self, ranks: Collection[int]) -> bool:
        """Ends the workers of the rank, which has ended; True once none is left."""
        try:
            alive = [pid for pid, ticks in self._noted.items() if pid not in ranks and _is_alive(pid, ticks)]
        except OSError:  # the kernel cannot answer now: it is asked again
            return False
        left = [pid for pid in alive if self._is_worker(pid)]  # until it executes another program
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return not left

    def _is_worker(self, pid: int) -> bool:
        command = _command(pid)
        return bool(command) and (command == self._command or any(name in command for name in _SPAWNED))


def _descendants(pid: int, without: Collection[int]) -> Iterator[int]:
    """The children of all threads, and theirs; none if the kernel does not list them (CONFIG_PROC_CHILDREN)."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                children += map(int, file.read().split())
    for child in children:
        if child not in without:
            yield child
            yield from _descendants(child, without)


def _is_alive(pid: int, start_ticks: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.start_ticks == start_ticks and stat.state not in "ZX"


def _command(pid: int) -> bytes:
    """The command line of a process, empty if there is no such process."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
    return b""


class WatchedRank:
    """One rank: its process, and the messages that it has sent.

    Attributes:
        slot: the index of the rank's page in the shared memory.
        finished: True while the rank needs no other rank: it rests or has left.
        at_end: it has reached the end of its run, and waits for the others.
        joining_until_s: the time by which it has to join the others; None before and afterwards.
        reported_exit_code: the exit status that its parent has reported.
        lost_since_s: the time at which the job has lost it and has gone on; None otherwise.
        advice: its last line for the failure, such as the file to resume from; it has left the failed run.
    """

    def __init__(self, rank: int, process: WatchedProcess, slot: int) -> None:
        self.rank = rank
        self.process = process
        self.slot = slot
        self.workers = Workers(process.pid)
        self.finished = self.at_end = self.has_left = self.can_be_lost = False
        self.joining_until_s: float | None = None
        self.reported_exit_code: int | None = None
        self.advice = ""
        self.lost_since_s: float | None = None
        self.stopped_since_s: float | None = None
        self.ended_since_s: float | None = None

    def failure(self, what: str, age_s: float = 0.0) -> Failure:
        return Failure(what, rank=self.rank, host=host_name(), pid=self.process.pid, age_s=age_s)


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

    def add(self, rank: int, pid: int) -> WatchedRank:
        """Watches the process ``pid`` as ``rank``; its parent may name it before it connects.

        Raises ValueError if the rank belongs to another process, or is one too many; ProcessLookupError without one.
        """
        known = self._ranks.get(rank)
        if known is not None and known.process.pid != pid:
            raise ValueError(
                f"rank {rank} is the process {known.process.pid} already, and {pid} says that it is rank {rank}; "
                "give each process a rank of its own"
            )
        if known is None and len(self._ranks) >= self.num_ranks:
            raise ValueError(
                f"rank {rank} (pid {pid}) is one too many: the guardian was started for {self.num_ranks} ranks and has "
                f"{', '.join(map(str, sorted(self._ranks)))}; start it with num_ranks={self.num_ranks + 1}"
            )
        if known is None:
            known = self._ranks[rank] = WatchedRank(rank, WatchedProcess(pid), len(self._ranks))
        return known

    def begin(self, run: int) -> bool:
        """Begins a further run, to which all ranks have to come; False if it has begun already."""
        if run <= self.run:
            return False
        self.run = run
        for rank in self:
            rank.finished = rank.at_end = rank.can_be_lost = False
        return True

    def get(self, rank: object) -> WatchedRank | None:
        """The rank, if it has connected."""
        return self._ranks.get(rank) if isinstance(rank, int) else None

    @property
    def at_work(self) -> list[WatchedRank]:
        """The ranks that have not finished."""
        return [rank for rank in self if not rank.finished]

    @property
    def resting(self) -> list[WatchedRank]:
        """The ranks between two runs."""
        return [rank for rank in self if rank.finished and not rank.has_left and rank.process.state() != ENDED]

    @property
    def all_at_end(self) -> bool:
        """True once every rank of the host has reached the end of its run."""
        return len(self) == self.num_ranks and all(rank.at_end for rank in self)

    def restart_timers(self) -> None:
        """Restarts the time for which ranks have been stopped: this process was stopped too."""
        for rank in self:
            rank.stopped_since_s = None

    def observe(self, now_s: float) -> Failure | None:
        """Looks at all processes; returns the failure that they show, if any, or of one that has not joined in time.

        If several have ended, one that a signal ended comes first: an exit status is more often a consequence.
        """
        ended: list[tuple[bool, WatchedRank, int | None]] = []
        stopped: list[tuple[WatchedRank, float]] = []
        for rank in self.at_work:
            state = rank.process.state()
            if state == ENDED:
                exit_code = rank.process.exit_code()
                exit_code = rank.reported_exit_code if exit_code is None else exit_code
                rank.ended_since_s = now_s if rank.ended_since_s is None else rank.ended_since_s
                # Its parent's report of the exit status, and its own last message, may still be under way.
                if exit_code or now_s - rank.ended_since_s > _PARENT_REPORT_S:
                    ended.append((exit_code is None or exit_code >= 0, rank, exit_code))
            rank.stopped_since_s = (rank.stopped_since_s or now_s) if state == STOPPED else None
            if rank.stopped_since_s is not None:
                stopped.append((rank, rank.stopped_since_s))
        if ended:
            _, rank, exit_code = min(ended, key=lambda each: each[0])
            return rank.failure(ended_text(exit_code) + " before its run was over" * (exit_code == 0))
        for rank in self.at_work:
            if rank.joining_until_s is not None and now_s > rank.joining_until_s:
                return rank.failure("has not joined the others in time (join_timeout_s)")
        if not self.others_wait and len(stopped) == len(self.at_work):
            self.restart_timers()  # the whole job is suspended, by Ctrl-Z for example: no rank waits
            return None
        for rank, since_s in stopped:
            if now_s - since_s > self.stopped_limit_s:
                signals = "a signal (SIGSTOP, SIGTSTP...)"
                what = f"has been stopped by {signals} for {now_s - since_s:.1f} s while others wait"
                return rank.failure(what, now_s - since_s)
        return None


class Shutdown:
    """The last seconds of the ranks at work; ``waits`` are lines about collectives in which ranks waited."""

    def __init__(self, failure: Failure, now_s: float, timeout_s: float, waits: list[str]) -> None:
        self.failure, self.waits = failure, waits
        self._kill_at_s = now_s - failure.age_s + OWN_TIME * timeout_s

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

    def print(self, ranks: Ranks) -> None:
        """Prints the failure in the terminal, on the failed rank's host with its traceback."""
        lines = [self.failure.traceback] if ranks.get(self.failure.rank) is not None else []
        lines += closing_lines(self.failure, self.waits)
        lines += [rank.advice for rank in sorted(ranks, key=lambda rank: rank.rank) if rank.advice][:1]
        print_text("".join(f"{line}\n" for line in lines if line), limit_s=_PRINT_S)
