"""One job with a planted fault: started as a user would start it, watched from outside, and cleared away afterwards."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from lightning_multigpu.emulation import EmulatedHosts, Host
from tests import preforked
from tests.launch import fault_script
from tests.leaks import abandoned_shared_memory, shared_memory_entries
from tests.world import free_port

_MARK = "FAULT_JOB_MARK"
_POLL_S = 0.05
# Folders that a killed rank leaves: of Open MPI, where Lightning imports mpi4py, and of multiprocessing.
_OF_LIBRARIES = ("ompi.", "pymp-")
_WEIGHTS = re.compile(r"^weights (\d+\.\d+)$", re.MULTILINE)
# Python code that never returns is reported, and ends nothing; the job is then ended from here.
REPORTED = ("hang",)
_REPORT = re.compile(r"^No progress for \d+ s \(hang_report_s", re.MULTILINE)
_START_TIMEOUT_S = 120.0
_PLANTED = re.compile(r"^.*Planted fault, pid \d+.*$", re.MULTILINE)
_PROBE = re.compile(r"tmp[a-z0-9_]{8}")
_REPOSITORY = Path(__file__).parents[1]


@dataclass(frozen=True)
class Outcome:
    """The end of a job.

    Attributes:
        kind: of the fault, or of the control.
        struck: whether the fault happened.
        statuses: exit statuses of the processes that the user started; None for one that had not ended in time.
        ended_after_s: from the fault to the end of the last process of the job; None if some were left.
        survivors: the processes that were left at the deadline, one line each.
        orphans: those of them that the user did not start.
        leaks: shared memory, listening sockets and files that were left, one line each.
        names_rank: whether the output, apart from the fault's own line, says which rank, host or guardian it was.
        weights: as rank 0 told them at the end of training, or None.
        reported: a report of the hang has come; only of ``hang``, which ends nothing.
        resumed: False if the job was resumed and did not come to the weights of a run without faults.
        is_control: nothing has failed, and nothing may end.
        left_by_torch: files that torch leaves without this package too.
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
    weights: float | None = None
    reported: bool = False
    resumed: bool = True
    is_control: bool = False
    left_by_torch: tuple[str, ...] = ()

    @property
    def hung(self) -> bool:
        return bool(self.survivors) and self.kind not in REPORTED

    def verdict(self) -> str:
        """A few words for a table."""
        if not self.struck:
            return "fault never came"
        if not self.resumed:
            return "NOT RESUMED"
        if self.kind in REPORTED and (self.reported or self.survivors):
            return "reported" if self.reported else "NOT REPORTED"
        codes = ",".join("-" if status is None else str(status) for status in self.statuses)
        return f"HANG ({codes})" if self.hung else f"ended ({codes})"

    def is_right(self, weights: float | None = None) -> bool:
        """Nothing hung or was left, and the exit status tells of the fault.

        Args:
            weights: of a run without faults; a control has to come to the same.
        """
        if not self.struck or self.hung or self.leaks or not self.resumed:
            return False
        if self.kind in REPORTED:
            return self.reported or (self.names_rank and not {0, None} & set(self.statuses))  # joining is limited
        if self.is_control:
            return set(self.statuses) == {0} and (weights is None or _agree(self.weights, weights))
        # A signal that ends all ranks in order is the failure of none.
        return 0 not in self.statuses and (self.names_rank or self.kind in ("interrupt", "terminate"))

    def of_process(self, index: int) -> str:
        """The output of one of the processes that the user started."""
        return self.output.split(f"--- {index} ---\n")[1].split("\n--- ")[0]


class FaultJob:
    """The script of :mod:`tests.launch.fault_script`, under one launcher.

    Args:
        directory: empty; for checkpoints, temporary files and outputs.
        arguments: of the script.
        launcher: with ``"external"`` every rank is started here, with ``"hosts"`` on an emulated host of its own, else
            one process that starts the others.
        variables: of the environment, on top of this process's.
        forked: its processes are forked from one that has imported Lightning, which saves seconds.
    """

    def __init__(
        self,
        directory: Path,
        arguments: list[str],
        launcher: str,
        variables: Mapping[str, str] | None = None,
        *,
        forked: bool = False,
    ) -> None:
        self._saved, self._temporary, self._outputs = (directory / name for name in ("saved", "temporary", "outputs"))
        shutil.rmtree(self._temporary, ignore_errors=True)  # of an earlier job here, which had to be killed
        for folder in (self._saved, self._temporary, self._outputs):
            folder.mkdir(exist_ok=True)
        self._command = [sys.executable, "-m", fault_script.__name__, *arguments]
        _, kind, where, *_ = arguments
        self._is_control = fault_script.must_survive(kind, where)
        self._in_loader = where == "data"
        self._launcher = launcher
        self._variables = variables or {}
        self._forked = forked
        self._mark = f"{os.getpid()}-{directory.name}"
        self._started: list[subprocess.Popen[bytes]] = []

    def run(self, *, rank: int, kind: str, deadline_s: float) -> Outcome:
        """Runs the job to its end, or until ``deadline_s`` after the fault."""
        num_hosts = fault_script.NUM_HOSTS.get(kind, fault_script.RANKS)
        with EmulatedHosts(num_hosts) if self._launcher == "hosts" else contextlib.nullcontext() as hosts:
            return self._run(hosts, rank, kind, deadline_s)

    def _run(self, hosts: EmulatedHosts | None, rank: int, kind: str, deadline_s: float) -> Outcome:
        segments = shared_memory_entries()
        by_torch: list[Path] = []
        try:
            self._start(hosts)
            struck = self._await_fault() or kind == "nothing"
            fault_s = time.monotonic()
            left = self._await_end(fault_s + deadline_s, until_report=kind in REPORTED)
            ended_after_s = None if left else time.monotonic() - fault_s
            statuses = tuple(process.poll() for process in self._started)
            survivors = tuple(describe(process) for process in left)
            orphans = len({process.pid for process in left} - {process.pid for process in self._started})
            ports = sum(num_listening(process) for process in left)
            show_stacks(left, fault_script.STACKS_SIGNAL)
            leaks = [f"{ports} listening ports"] if ports else []
        finally:
            self._end_all()
        if kind in REPORTED:
            orphans, leaks = 0, []
        leaks += [f"/dev/shm/{name}" for name in abandoned_shared_memory(segments)]
        # Else they are what processes had that have just been ended; a host that vanishes takes its own with it.
        if not left and kind != "vanish":
            temporary = sorted(path for path in self._temporary.iterdir() if not path.name.startswith(_OF_LIBRARIES))
            by_torch = [path for path in temporary if self._in_loader and is_probe_of_torch(path)]
            leaks += [f"temporary {path.name}" for path in temporary if path not in by_torch]
        leaks += [f"half-written {path.name}" for path in sorted(self._saved.rglob("*")) if not is_whole(path)]
        output = self._output()
        notes = "".join(f"\nleft at the deadline: {line}" for line in survivors)
        told = _WEIGHTS.search(output)
        return Outcome(
            kind=kind,
            struck=struck,
            statuses=statuses,
            ended_after_s=ended_after_s,
            survivors=survivors,
            orphans=orphans,
            leaks=tuple(leaks),
            names_rank=bool(re.search(_name_of_failed(kind, rank), _PLANTED.sub("", output))),
            weights=None if told is None else float(told[1]),
            reported=bool(_REPORT.search(output)),
            is_control=self._is_control,
            left_by_torch=tuple(path.name for path in by_torch),
            output=output + notes,
        )

    def _start(self, hosts: EmulatedHosts | None) -> None:
        common = {
            **os.environ,
            **self._variables,
            _MARK: self._mark,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(_REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "SAVE_TO": str(self._saved),
            "TMPDIR": str(self._temporary),
        }
        if hosts is not None:
            number = str(len([*hosts]))
            for host in hosts:
                place = {**host.environment(), "NUM_NODES": number, "RANKS": number}
                place["SWITCH"] = str(hosts.switch.pid)
                place["HOSTS"] = " ".join(str(other.namespace.pid) for other in hosts)
                self._start_process({**common, **place}, host)
            return
        if self._launcher != "external":
            self._start_process(common)
            return
        port = str(free_port())
        for local_rank in range(fault_script.RANKS):
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0", "LOCAL_RANK": str(local_rank)}
            self._start_process({**common, **place, "WORLD_SIZE": str(fault_script.RANKS)})

    def _start_process(self, environment: dict[str, str], host: Host | None = None) -> None:
        start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen if host is None else host.popen
        if self._forked:
            start = functools.partial(preforked.Process, namespace=None if host is None else host.namespace.pid)
        with (self._outputs / f"{len(self._started)}.log").open("wb") as output:
            self._started.append(
                start(
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

    def _await_end(self, deadline: float, *, until_report: bool) -> list[psutil.Process]:
        """The processes that are left when all have ended or the time is over."""
        # A look at all processes of the machine takes time: the job's own come first.
        while any(process.poll() is None for process in self._started) or self._processes():
            if time.monotonic() > deadline or (until_report and _REPORT.search(self._output())):
                return self._processes()
            time.sleep(_POLL_S)
        return []

    def _processes(self) -> list[psutil.Process]:
        """The processes that were started, and all others that carry this job's mark in their environment."""
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
                used |= shared_memory(process)
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


def _name_of_failed(kind: str, rank: int) -> str:
    """The regular expression that a message must match; on emulated hosts there is one rank a host."""
    if kind in fault_script.HOST_KINDS:
        return rf"\bnode {rank}\b"
    return r"\bthe guardian\b" if "guardian" in kind else rf"\brank {rank}\b"


def is_probe_of_torch(path: Path) -> bool:
    """True if torch's DataLoader has made it to see how many more files it may open, when a worker had died.

    Its own handler of SIGCHLD raises while it makes ten of them; one process that has nothing but a DataLoader, whose
    worker is killed, left such a file in 1 of 150 runs (torch 2.13.0).
    """
    return bool(_PROBE.fullmatch(path.name)) and path.is_file() and path.stat().st_size == 0


def _agree(one: float | None, other: float) -> bool:
    return one is not None and abs(one - other) < 1e-9 * abs(other)


def describe(process: psutil.Process) -> str:
    """One line about a process that is left."""
    with contextlib.suppress(psutil.Error):
        environment = process.environ()
        rank = environment.get("LOCAL_RANK", "0 or spawned")
        return f"pid {process.pid}, {process.status()}, local rank {rank}: {' '.join(process.cmdline())}"
    return f"pid {process.pid}"


def show_stacks(processes: list[psutil.Process], number: signal.Signals) -> None:
    """Has those that still run write into the job's output where they stand."""
    for process in processes:
        # Whoever has no handler would be ended by the signal; Lightning removes ours at the end of a run.
        if _handles(process, number):
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
            time.sleep(0.3)  # or they write into each other's lines


def num_listening(process: psutil.Process) -> int:
    """Number of ports that the process listens at."""
    with contextlib.suppress(psutil.Error):
        return sum(connection.status == psutil.CONN_LISTEN for connection in process.net_connections("inet"))
    return 0


def shared_memory(process: psutil.Process) -> set[Path]:
    """Files in /dev/shm that the process has mapped."""
    with contextlib.suppress(psutil.Error):
        mapped = {Path(region.path) for region in process.memory_maps()}
        return {path for path in mapped if path.parent == Path("/dev/shm") and path.exists()}
    return set()


def is_whole(path: Path) -> bool:
    """A checkpoint is a zip archive, whose table of contents is written last."""
    if path.is_dir():
        return True
    return path.suffix == ".ckpt" and zipfile.is_zipfile(path)


def _handles(process: psutil.Process, number: signal.Signals) -> bool:
    with contextlib.suppress(OSError):
        caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
    return False
