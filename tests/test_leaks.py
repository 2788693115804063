"""Every kind of leftover is seen, named, and put back where that can be done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
import torch

from tests.leaks import ProcessState, abandoned_shared_memory, leaks_since, shared_memory_entries


def nothing() -> None:
    pass


def leave_variable() -> Callable[[], None]:
    os.environ["LEFT"] = "1"
    return nothing


def leave_directory() -> Callable[[], None]:
    os.chdir("/")
    return nothing


def leave_handler() -> Callable[[], None]:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return nothing


def leave_dtype() -> Callable[[], None]:
    torch.set_default_dtype(torch.float64)
    return nothing


def leave_thread() -> Callable[[], None]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="lazy")
    thread.start()

    def undo() -> None:
        end.set()
        thread.join()

    return undo


def leave_child() -> Callable[[], None]:
    process = subprocess.Popen(["sleep", "60"])

    def undo() -> None:
        process.kill()
        process.wait()

    return undo


def leave_file() -> Callable[[], None]:
    descriptor = os.open("/etc/passwd", os.O_RDONLY)
    return lambda: os.close(descriptor)


@pytest.mark.parametrize(
    ("leave", "text"),
    [
        (leave_variable, "environment: LEFT='1' was added"),
        (leave_directory, "working directory is now /"),
        (leave_handler, "signal SIGUSR1: handler is now"),
        (leave_dtype, "torch: default dtype changed from torch.float32 to torch.float64"),
        (leave_thread, "thread 'lazy' still runs"),
        (leave_child, "child process"),
        (leave_file, "is open: /etc/passwd"),
    ],
)
def test_each_kind_is_seen_once_and_can_be_put_back(leave: Callable[[], Callable[[], None]], text: str) -> None:
    before = ProcessState.take()
    undo = leave()
    (leak,) = leaks_since(before, patience_s=0)
    assert text in leak
    undo()
    before.restore()
    assert leaks_since(before) == []


def test_what_ends_by_itself_in_time_is_no_leak() -> None:
    before = ProcessState.take()
    threading.Timer(0.1, nothing).start()
    assert leaks_since(before, patience_s=10) == []


def test_children_of_the_tests_themselves_are_ignored_with_all_that_they_start() -> None:
    before = ProcessState.take()
    with subprocess.Popen(["sh", "-c", "sleep 60; true"], start_new_session=True) as process:
        assert leaks_since(before, ignored_children={process.pid}, patience_s=0) == []
        os.killpg(process.pid, signal.SIGKILL)


def test_shared_memory_that_nobody_uses_is_abandoned() -> None:
    before = shared_memory_entries()
    name = f"tests-{uuid.uuid4().hex}"
    segment = SharedMemory(name, create=True, size=64)
    try:
        assert name in abandoned_shared_memory(before, patience_s=0)
    finally:
        segment.close()
        segment.unlink()


def test_shared_memory_of_another_running_process_is_not(tmp_path: Path) -> None:
    before = shared_memory_entries()
    name = f"tests-{uuid.uuid4().hex}"
    script = (
        "import mmap, os, sys\n"
        f"path = '/dev/shm/{name}'\n"
        "with open(path, 'w+b') as file:\n"
        "    file.truncate(4096)\n"
        "    memory = mmap.mmap(file.fileno(), 4096)\n"
        "print('mapped', flush=True)\n"
        "input()\n"
        "os.unlink(path)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mapped\n"
        assert name not in abandoned_shared_memory(before, patience_s=0)
        process.communicate("\n")
