"""Traces of a job that can be seen from outside: its processes and what they leave behind."""

from __future__ import annotations

import contextlib
import re
import signal
import time
import zipfile
from pathlib import Path

import psutil


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
    """How many ports the process listens at."""
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
    """A checkpoint is a zip archive, whose table of contents is written last. A file about the failure may be there."""
    if path.is_dir() or path.match("failure-*.txt") or path.match("hang-*.txt"):
        return True
    return path.suffix == ".ckpt" and zipfile.is_zipfile(path)


def _handles(process: psutil.Process, number: signal.Signals) -> bool:
    with contextlib.suppress(OSError):
        caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
    return False
