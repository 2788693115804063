"""What code left behind in its process: threads, children, open files, environment, handlers, torch's settings."""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

# Processes of the tests themselves, with all that they start: ranks of worlds, and the server of preforked.py.
OWN_PROCESSES: set[int] = set()

# Set by Lightning or by its dependencies on purpose, for child processes and workers that come later.
_ENVIRONMENT_THAT_MAY_CHANGE = frozenset({
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
})  # fmt: skip
# Lightning's environments set and remove these as they like; a later test that starts processes must not inherit them.
_PUT_BACK_IN_SILENCE = frozenset({"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"})

# One for the life of the process, started by the standard library or by tqdm at first use.
_THREADS_THAT_MAY_STAY = ("tqdm_monitor", "TMonitor", "pymp-", "QueueFeederThread")
_CHILDREN_THAT_MAY_STAY = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_FILES_THAT_MAY_STAY = ("/memfd:rank-stacks", "/dev/null", "/dev/random", "/dev/urandom", "/proc/", "/sys/")

# Without SIGCHLD: torch's DataLoader sets its handler for it once a process, for good, and relies on it.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


@dataclass(frozen=True)
class ProcessState:
    """A photograph of this process, to be compared with a later one."""

    environment: dict[str, str]
    directory: str
    threads: frozenset[tuple[int | None, str]]
    children: frozenset[tuple[int, str]]
    files: frozenset[tuple[str, str]]
    handlers: dict[int, Any]
    torch_settings: dict[str, Any]

    @classmethod
    def take(cls, *, ignored_children: Collection[int] = (), with_files: bool = True) -> "ProcessState":
        """Photographs this process. Ignored children belong to the tests, and so do the files of a test runner."""
        return cls(
            environment={k: v for k, v in os.environ.items() if k not in _ENVIRONMENT_THAT_MAY_CHANGE},
            directory=os.getcwd(),
            threads=frozenset(
                (t.ident, t.name) for t in threading.enumerate() if not t.name.startswith(_THREADS_THAT_MAY_STAY)
            ),
            children=frozenset(_children(ignored_children)),
            files=frozenset(_open_files()) if with_files else frozenset(),
            handlers={number: signal.getsignal(number) for number in _SIGNALS},
            torch_settings=_torch_settings(),
        )

    def differences(self, later: "ProcessState") -> list[str]:
        """One line for each thing that ``later`` has and this state has not, and for each setting that changed."""
        lines = [
            f"environment: {line}"
            for line in _changes(_without_meeting_place(self.environment), _without_meeting_place(later.environment))
        ]
        if self.torch_settings:  # else torch was imported meanwhile
            lines += [f"torch: {line}" for line in _changes(self.torch_settings, later.torch_settings)]
        lines += [f"signal {signal.Signals(n).name}: handler is now {h!r}" for n, h in later.handlers.items()
                  if h != self.handlers[n]]  # fmt: skip
        lines += [f"thread {name!r} still runs" for _, name in sorted(later.threads - self.threads, key=str)]
        lines += [f"child process {pid} still runs: {line}" for pid, line in sorted(later.children - self.children)]
        lines += [f"file descriptor {fd} is open: {target}" for fd, target in sorted(later.files - self.files)]
        if later.directory != self.directory:
            lines.append(f"working directory is now {later.directory}")
        return lines

    def restore(self) -> None:
        """Puts back what can be put back: environment, directory, signal handlers, torch's settings."""
        for name in set(os.environ) - set(self.environment) - _ENVIRONMENT_THAT_MAY_CHANGE:
            del os.environ[name]
        os.environ.update(self.environment)
        os.chdir(self.directory)
        if threading.current_thread() is threading.main_thread():
            for number, handler in self.handlers.items():
                if signal.getsignal(number) != handler and handler is not None:
                    signal.signal(number, handler)
        _restore_torch(self.torch_settings)


def leaks_since(
    before: ProcessState, *, ignored_children: Collection[int] = (), with_files: bool = True, patience_s: float = 2.0
) -> list[str]:
    """What came since ``before`` and is still there; threads, children and sockets get ``patience_s`` to end."""
    deadline = time.monotonic() + patience_s
    while True:
        found = before.differences(ProcessState.take(ignored_children=ignored_children, with_files=with_files))
        if not found or time.monotonic() > deadline:
            return found
        gc.collect()
        time.sleep(0.05)


def shared_memory_entries() -> frozenset[str]:
    """Names in /dev/shm, but for the semaphores of multiprocessing and loky: those of any job have random names,
    and the own tracker of each job removes them. Nor those of CUDA's driver, which a killed process cannot remove."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return frozenset(name for name in names if not name.startswith(("sem.mp-", "sem.loky-", "cuda.shm.")))


def abandoned_shared_memory(before: frozenset[str], *, patience_s: float = 1.0) -> list[str]:
    """New names in /dev/shm that no process outside this one uses: those of other jobs on the machine do not count."""
    deadline = time.monotonic() + patience_s
    while new := shared_memory_entries() - before:
        if time.monotonic() > deadline:
            in_use = _mapped_by_others()
            return sorted(name for name in new & shared_memory_entries() if name not in in_use)
        time.sleep(0.05)
    return []


def _children(ignored: Collection[int]) -> list[tuple[int, str]]:
    found = []
    pending = _child_pids(os.getpid())
    while pending:
        pid = pending.pop()
        if pid in ignored:
            continue
        try:
            child = psutil.Process(pid)
            line = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and not any(name in line for name in _CHILDREN_THAT_MAY_STAY):
                found.append((pid, line))
                pending += _child_pids(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def _child_pids(parent: int) -> list[int]:
    """As psutil finds them, which looks at all processes of the machine: 6 ms each time, several times a test."""
    try:
        tasks = Path(f"/proc/{parent}/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    except OSError:  # a thread has ended meanwhile, or the kernel does not list children
        return [child.pid for child in psutil.Process(parent).children()]


def _open_files() -> list[tuple[str, str]]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the descriptor of the listing itself
            continue
        if not target.startswith(_FILES_THAT_MAY_STAY):
            found.append((fd, target))
    return found


def _mapped_by_others() -> set[str]:
    names: set[str] = set()
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit() or int(directory.name) == os.getpid():
            continue
        try:
            lines = (directory / "maps").read_text().splitlines()
        except OSError:  # ended meanwhile, or of another user
            continue
        names.update(Path(line.split(maxsplit=5)[5]).name for line in lines if "/dev/shm/" in line)
    return names


def _changes(before: dict[str, Any], later: dict[str, Any]) -> list[str]:
    lines = [f"{k} was removed" for k in sorted(before.keys() - later.keys())]
    lines += [f"{k}={later[k]!r} was added" for k in sorted(later.keys() - before.keys())]
    lines += [
        f"{k} changed from {before[k]!r} to {later[k]!r}"
        for k in sorted(before.keys() & later.keys())
        if before[k] != later[k]
    ]
    return lines


def _without_meeting_place(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _PUT_BACK_IN_SILENCE}


def _torch_settings() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "distributed"):
        return {}
    return {
        "default dtype": torch.get_default_dtype(),
        "gradients enabled": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "number of threads": torch.get_num_threads(),
        "default process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
    }


def _restore_torch(settings: dict[str, Any]) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not settings:
        return
    torch.set_default_dtype(settings["default dtype"])
    torch.set_grad_enabled(settings["gradients enabled"])
    torch.use_deterministic_algorithms(settings["deterministic algorithms"])
    torch.set_num_threads(settings["number of threads"])
    if torch.distributed.is_initialized() and not settings["default process group"]:
        torch.distributed.destroy_process_group()
