"""The worker processes of ranks, of data loaders and parameter servers: none outlives its rank."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterator

from lightning_multigpu.job.guardian.proc import Stat, read_stat

# Commands of processes that run the rank's own code. Multiprocessing's resource tracker is not among them: it removes
# files of the others, and then ends itself.
_SPAWNED = (b"multiprocessing.spawn", b"multiprocessing.forkserver")
SERVER = "lightning_multigpu.engine.parameter_server.server"
"""The module of a parameter server, which is on its command line. It ends by itself, unless it is stopped."""


class Workers:
    """The descendants of ranks. They are noted while the rank runs: afterwards the kernel no longer links them."""

    def __init__(self) -> None:
        self._noted: dict[int, dict[int, int]] = {}
        self._commands: dict[int, bytes] = {}
        self._stopped: dict[int, float] = {}

    def note(self, rank: int, ranks: Collection[int]) -> None:
        """Notes the workers of the process ``rank``; the processes ``ranks`` are no workers."""
        command = self._commands[rank] = _command(rank) or self._commands.get(rank, b"")
        noted = self._noted.setdefault(rank, {})
        found = set(_descendants(rank, ranks))
        for pid in noted.keys() - found:  # it has ended, or lost its parent: loaders may start new ones each epoch
            with contextlib.suppress(OSError):  # the kernel cannot answer now
                if not _is_alive(pid, noted[pid]):
                    del noted[pid]
                    self._stopped.pop(pid, None)
        for pid in found:
            stat = _stat(pid)
            if stat is not None and noted.get(pid) != stat.start_ticks and _is_worker(_command(pid), command):
                noted[pid] = stat.start_ticks

    def stopped(self, rank: int, now_s: float) -> tuple[str, float] | None:
        """A stopped worker of ``rank``, and the time since when: the rank waits for it, and others wait for the rank.

        Call it often, while ``rank`` itself is not stopped.
        """
        for pid, start_ticks in self._noted.get(rank, {}).items():
            stat = _stat(pid)
            is_stopped = stat is not None and stat.start_ticks == start_ticks and stat.state == "T"
            if is_stopped and self._is_still_one(pid, rank):
                kind = "parameter server" if _is_server(_command(pid)) else "worker"
                return f"{kind} (pid {pid})", self._stopped.setdefault(pid, now_s)
            self._stopped.pop(pid, None)
        return None

    def restart_timers(self) -> None:
        """Restarts the time for which workers have been stopped."""
        self._stopped.clear()

    def end(self, rank: int, ranks: Collection[int]) -> bool:
        """Ends the workers of ``rank``, which has ended; True once none is left."""
        noted = self._noted.get(rank, {})
        try:
            alive = [pid for pid, start_ticks in noted.items() if pid not in ranks and _is_alive(pid, start_ticks)]
        except OSError:  # the kernel cannot answer now: it is asked again
            return False
        left = [pid for pid in alive if self._is_still_one(pid, rank) and not _ends_itself(pid)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return not left

    def _is_still_one(self, pid: int, rank: int) -> bool:
        """Whether a process is still a worker: a child looks like one until it executes another program."""
        return _is_worker(_command(pid), self._commands.get(rank, b""))


def _descendants(pid: int, without: Collection[int]) -> Iterator[int]:
    pending = [pid]
    while pending:
        parent = pending.pop()
        for child in _children(parent):
            if child not in without:
                pending.append(child)
                yield child


def _children(pid: int) -> list[int]:
    """Children of all threads; none if the kernel does not list them (CONFIG_PROC_CHILDREN)."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def _is_worker(command: bytes, command_of_rank: bytes) -> bool:
    if not command:
        return False
    return command == command_of_rank or any(name in command for name in _SPAWNED) or _is_server(command)


def _is_server(command: bytes) -> bool:
    return SERVER.encode() in command


def _ends_itself(pid: int) -> bool:
    """Whether it is a server that runs: it ends with its rank, unless other ranks go on with it."""
    stat = _stat(pid)
    return _is_server(_command(pid)) and stat is not None and stat.state != "T"


def _stat(pid: int) -> Stat | None:
    """The kernel's view of a process; also None if the kernel cannot answer now: the next round asks again."""
    with contextlib.suppress(OSError):
        return read_stat(pid)
    return None


def _is_alive(pid: int, start_ticks: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.start_ticks == start_ticks and stat.state not in "ZX"


def _command(pid: int) -> bytes:
    """The command line of a process, empty if there is no such process."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
    return b""
