"""The worker processes of a rank, such as those of data loaders: none outlives the rank."""

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
    """The descendants of a rank. They are noted while it runs: afterwards the kernel no longer links them."""

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
