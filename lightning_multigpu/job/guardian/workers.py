"""The worker processes of ranks, such as those of data loaders: none outlives its rank."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterator

from lightning_multigpu.job.guardian.proc import read_stat

# Commands of processes that run the rank's own code. Multiprocessing's resource tracker is not among them: it removes
# files of the others, and then ends itself. Neither is a parameter server, which other ranks may still need.
_SPAWNED = (b"multiprocessing.spawn", b"multiprocessing.forkserver")


class Workers:
    """The descendants of ranks. They are noted while the rank runs: afterwards the kernel no longer links them."""

    def __init__(self) -> None:
        self._noted: dict[int, dict[int, int]] = {}
        self._commands: dict[int, bytes] = {}

    def note(self, rank: int, ranks: Collection[int]) -> None:
        """Notes the workers of the process ``rank``; the processes ``ranks`` are no workers."""
        command = self._commands[rank] = _command(rank) or self._commands.get(rank, b"")
        noted = self._noted.setdefault(rank, {})
        with contextlib.suppress(OSError):  # the kernel cannot answer now: the next round asks again
            for pid in [pid for pid, start_ticks in noted.items() if not _is_alive(pid, start_ticks)]:
                del noted[pid]  # loaders may start new ones each epoch
            for pid in _descendants(rank, ranks):
                stat = read_stat(pid)
                if stat is not None and noted.get(pid) != stat.start_ticks and _is_worker(pid, command):
                    noted[pid] = stat.start_ticks

    def end(self, rank: int, ranks: Collection[int]) -> bool:
        """Ends the workers of ``rank``, which has ended; True once none is left."""
        command, noted = self._commands.get(rank, b""), self._noted.get(rank, {})
        try:
            alive = [pid for pid, start_ticks in noted.items() if pid not in ranks and _is_alive(pid, start_ticks)]
        except OSError:  # the kernel cannot answer now: it is asked again
            return False
        left = [pid for pid in alive if _is_worker(pid, command)]  # until it executes another program
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return not left


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


def _is_worker(pid: int, command_of_rank: bytes) -> bool:
    command = _command(pid)
    return bool(command) and (command == command_of_rank or any(name in command for name in _SPAWNED))


def _is_alive(pid: int, start_ticks: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.start_ticks == start_ticks and stat.state not in "ZX"


def _command(pid: int) -> bytes:
    """The command line of a process, empty if there is no such process."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
    return b""
