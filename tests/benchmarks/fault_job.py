"""One job with a planted fault: started as a user would, watched from outside, and cleared away whatever happens."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.launch import fault_script
from tests.leaks import abandoned_shared_memory, shared_memory_entries
from tests.world import free_port

_MARK = "FAULT_JOB_MARK"
_POLL_S = 0.05
_START_TIMEOUT_S = 120.0
_PLANTED = re.compile(r"^.*Planted fault, pid \d+.*$", re.MULTILINE)
_REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        kind: of the fault.
        struck: whether the fault happened.
        statuses: exit statuses of the processes that the user started; None for one that had not ended in time.
        ended_after_s: from the fault to the end of the last process of the job; None if some were left.
        survivors: the processes that were left at the deadline, one line each.
        orphans: those of them that the user did not start.
        leaks: shared memory, listening sockets and files that were left, one line each.
        names_rank: whether the output, apart from the fault's own line, says which rank it was.
        output: of all processes.
    """

    kind: str
    struck: bool
    statuses: tuple[int | None, ...]
    ended_after_s: float | None
    survivors: tuple[str, ...]
    orphans: int
    leaks: tuple[str, ...]
    names_rank: bool
    output: str

    @property
    def hung(self) -> bool:
        return bool(self.survivors)

    def verdict(self) -> str:
        """A few words for a table."""
        if not self.struck:
            return "fault never came"
        codes = ",".join("-" if status is None else str(status) for status in self.statuses)
        return f"HANG ({codes})" if self.hung else f"ended ({codes})"

    def is_right(self) -> bool:
        """Nothing hung or was left, and the exit status tells of the fault."""
        return self.struck and 0 not in self.statuses and not self.hung and not self.leaks


class FaultJob:
    """The script of :mod:`tests.launch.fault_script`, under one launcher.

    Args:
        directory: empty; for checkpoints, temporary files and outputs.
        arguments: of the script.
        launcher: with ``"external"`` every rank is started here, else one process that starts the others.
    """

    def __init__(self, directory: Path, arguments: list[str], launcher: str) -> None:
        self._saved, self._temporary, self._outputs = (directory / name for name in ("saved", "temporary", "outputs"))
        for folder in (self._saved, self._temporary, self._outputs):
            folder.mkdir()
        self._command = [sys.executable, "-m", fault_script.__name__, *arguments]
        self._launcher = launcher
        self._mark = f"{os.getpid()}-{directory.name}"
        self._started: list[subprocess.Popen[bytes]] = []

    def run(self, *, rank: int, kind: str, deadline_s: float) -> Outcome:
        """Runs the job to its end, or until ``deadline_s`` after the fault."""
        segments = shared_memory_entries()
        try:
            self._start()
            struck = self._await_fault()
            fault_s = time.monotonic()
            left = self._await_end(fault_s + deadline_s)
            ended_after_s = None if left else time.monotonic() - fault_s
            statuses = tuple(process.poll() for process in self._started)
            survivors = tuple(_describe(process) for process in left)
            orphans = len({process.pid for process in left} - {process.pid for process in self._started})
            ports = sum(_num_listening(process) for process in left)
            _show_stacks(left)
            leaks = [f"{ports} listening ports"] if ports else []
        finally:
            self._end_all()
        leaks += [f"/dev/shm/{name}" for name in abandoned_shared_memory(segments)]
        if not left:  # else they are what processes had that have just been ended
            leaks += [f"temporary {path.name}" for path in sorted(self._temporary.iterdir())]
        leaks += [f"half-written {path.name}" for path in sorted(self._saved.rglob("*")) if not _is_whole(path)]
        output = self._output()
        names_rank = bool(re.search(rf"\brank {rank}\b", _PLANTED.sub("", output)))
        notes = "".join(f"\nleft at the deadline: {line}" for line in survivors)
        return Outcome(
            kind, struck, statuses, ended_after_s, survivors, orphans, tuple(leaks), names_rank, output + notes
        )

    def _start(self) -> None:
        common = {
            **os.environ,
            _MARK: self._mark,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(_REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "SAVE_TO": str(self._saved),
            "TMPDIR": str(self._temporary),
        }
        if self._launcher != "external":
            self._start_process(common)
            return
        port = str(free_port())
        for local_rank in range(fault_script.RANKS):
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0", "LOCAL_RANK": str(local_rank)}
            self._start_process({**common, **place, "WORLD_SIZE": str(fault_script.RANKS)})

    def _start_process(self, environment: dict[str, str]) -> None:
        with (self._outputs / f"{len(self._started)}.log").open("wb") as output:
            self._started.append(
                subprocess.Popen(
                    self._command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a signal from this terminal is not one of the job's faults
                    cwd=self._temporary,
                )
            )

    def _await_fault(self) -> bool:
        """Waits until the fault says that it happens, or the job ends without it."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            ended = all(process.poll() is not None for process in self._started)
            if _PLANTED.search(self._output()):
                return True
            if ended:
                return False
            time.sleep(_POLL_S)
        return False

    def _await_end(self, deadline: float) -> list[psutil.Process]:
        """The processes that are left when all have ended or the time is over."""
        while left := self._processes():
            if time.monotonic() > deadline:
                return left
            time.sleep(_POLL_S)
        return []

    def _processes(self) -> list[psutil.Process]:
        """Those that were started, and all others that carry this job's mark in their environment."""
        # The environment of a process is gone some time before its end is seen.
        started = {process.pid for process in self._started if process.poll() is None}
        return [p for p in psutil.process_iter() if p.pid in started or self._is_marked(p)]

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def _end_all(self) -> None:
        """Ends what is left, and removes its shared memory: nobody else is left to do so."""
        used: set[Path] = set()
        while left := self._processes():
            for process in left:
                used |= _shared_memory(process)
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(_POLL_S)
        for started in self._started:
            started.wait()
        for path in used:
            path.unlink(missing_ok=True)

    def _output(self) -> str:
        paths = sorted(self._outputs.iterdir())
        return "\n".join(f"--- {path.stem} ---\n{path.read_text(errors='replace')}" for path in paths)


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        environment = process.environ()
        rank = environment.get("LOCAL_RANK", "0 or spawned")
        return f"pid {process.pid}, {process.status()}, local rank {rank}: {' '.join(process.cmdline())}"
    return f"pid {process.pid}"


def _show_stacks(processes: list[psutil.Process]) -> None:
    """Has those that still run write into the job's output where they stand."""
    for process in processes:
        # Whoever has no handler would be ended by the signal; Lightning removes ours at the end of a run.
        if _handles(process, fault_script.STACKS_SIGNAL):
            with contextlib.suppress(psutil.Error):
                process.send_signal(fault_script.STACKS_SIGNAL)
            time.sleep(0.3)  # or they write into each other's lines


def _handles(process: psutil.Process, number: signal.Signals) -> bool:
    with contextlib.suppress(OSError):
        caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
    return False


def _num_listening(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return sum(connection.status == psutil.CONN_LISTEN for connection in process.net_connections("inet"))
    return 0


def _shared_memory(process: psutil.Process) -> set[Path]:
    with contextlib.suppress(psutil.Error):
        mapped = {Path(region.path) for region in process.memory_maps()}
        return {path for path in mapped if path.parent == Path("/dev/shm") and path.exists()}
    return set()


def _is_whole(path: Path) -> bool:
    """A checkpoint is a zip archive, whose table of contents is written last."""
    if path.is_dir():
        return True
    return path.suffix == ".ckpt" and zipfile.is_zipfile(path)
