"""Jobs of processes whose outputs are shown when something goes wrong, and of which nothing may be left.

The processes are forked from one that has imported Lightning.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from lightning_multigpu.emulation import Host
from tests import preforked

_REPOSITORY = Path(__file__).resolve().parents[2]
_OUTPUT_SHOWN = 4000  # characters a process
MARK = "JOB_MARK"
_END_TIMEOUT_S = 20.0


def marked(mark: str) -> list[psutil.Process]:
    """The processes of a job: those that have its mark in their environment."""
    return [process for process in psutil.process_iter() if _carries(process, mark)]


def _python_path() -> str:
    return f"{_REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def run(mark: str, *arguments: str, timeout_s: float = 400.0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs ``python ARGUMENTS`` to its end; everything that it starts must end with it. The ``mark`` is its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path(), MARK: mark, **variables}
    finished = preforked.run([sys.executable, *arguments], env=environment, timeout=timeout_s)
    assert_none_left(mark, finished.stderr)
    return finished


def assert_none_left(mark: str, output: str) -> None:
    """Waits for the end of a job's last processes; the guardian ends after the last rank."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"still running: {left}\n{output[-3000:]}"


class Job:
    """Processes that belong together; a context manager that leaves none of them, and of their children, behind."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: list[subprocess.Popen[Any]] = []
        directory.mkdir(parents=True, exist_ok=True)

    def start(self, host: Host | None, command: Sequence[str], env: Mapping[str, str], **given: Any) -> None:
        """Starts the next process on ``host``; on this machine itself for None."""
        environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": _python_path(), **env}
        environment[MARK] = str(self.directory)
        options: dict[str, Any] = {"stderr": subprocess.STDOUT, "env": {**os.environ, **environment}, **given}
        options["namespace"] = None if host is None else host.namespace.pid
        with self._path(len(self.processes)).open("wb") as file:
            self.processes.append(preforked.Process(command, stdout=file, **options))

    def output(self, index: int) -> str:
        return self._path(index).read_text(errors="replace")

    def wait(self, timeout_s: float = 300.0) -> None:
        """Waits until all have ended well; fails with all outputs if one does not, or not in time."""
        deadline = time.monotonic() + timeout_s
        while None in (codes := [process.poll() for process in self.processes]) and not any(codes):
            assert time.monotonic() < deadline, f"the job did not end within {timeout_s} s\n{self._outputs()}"
            time.sleep(0.02)
        assert not any(codes), f"exit statuses {codes}\n{self._outputs()}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in [*self.processes, *marked(str(self.directory))]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in self.processes:
            process.wait()

    def _path(self, index: int) -> Path:
        return self.directory / f"process{index}.log"

    def _outputs(self) -> str:
        shown = [self.output(index)[-_OUTPUT_SHOWN:] for index in range(len(self.processes))]
        return "\n".join(f"--- output of process {index} ---\n{text}" for index, text in enumerate(shown))
