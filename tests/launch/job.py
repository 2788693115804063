"""A job of processes, one or more a host, whose outputs are shown when something goes wrong."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_multigpu.emulation import Host

_REPOSITORY = Path(__file__).resolve().parents[2]
_OUTPUT_SHOWN = 4000  # characters a process


class Job:
    """Processes that belong together; a context manager that leaves none of them behind.

    Args:
        directory: where the outputs are kept, one file a process.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: list[subprocess.Popen[Any]] = []
        directory.mkdir(parents=True, exist_ok=True)

    def start(self, host: Host, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Starts the next process on ``host``."""
        with self._path(len(self.processes)).open("wb") as file:
            paths = f"{_REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
            environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths, **env}
            self.processes.append(host.popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))

    def output(self, index: int) -> str:
        """Standard output and error of a process so far."""
        return self._path(index).read_text(errors="replace")

    def wait(self, timeout_s: float = 120.0) -> None:
        """Waits until all have ended well; fails with all outputs if one does not, or not in time."""
        self.wait_until(lambda: all(p.poll() is not None for p in self.processes), "the end of the job", timeout_s)
        codes = [process.returncode for process in self.processes]
        assert codes == [0] * len(codes), f"exit statuses {codes}\n{self._outputs()}"

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
        """Waits for something that the processes do; fails with their outputs when one fails or time is over."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            failed = [p.returncode for p in self.processes if p.poll() not in (None, 0)]
            assert not failed, f"a process ended with status {failed[0]} before {what}\n{self._outputs()}"
            assert time.monotonic() < deadline, f"{what} did not come within {timeout_s} s\n{self._outputs()}"
            time.sleep(0.02)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def _path(self, index: int) -> Path:
        return self.directory / f"process{index}.log"

    def _outputs(self) -> str:
        shown = [self.output(index)[-_OUTPUT_SHOWN:] for index in range(len(self.processes))]
        return "\n".join(f"--- output of process {index} ---\n{text}" for index, text in enumerate(shown))
