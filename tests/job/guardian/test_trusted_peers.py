"""Long messages, a system that refuses, and files that others have put in the way end no guardian."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

import pytest

from lightning_multigpu.job.guardian.blocking import done_within, print_text
from lightning_multigpu.job.guardian.hang.flight_recorder import PAGE_BYTES
from lightning_multigpu.job.guardian.protocol import Connection
from lightning_multigpu.job.guardian.watchdog import Watchdog
from tests.job.guardian.job import eventually

pytestmark = pytest.mark.launch


class Guarded:
    """A guardian whose loop a test turns."""

    def __init__(self) -> None:
        self.address = f"lightning-multigpu-test-{os.urandom(8).hex()}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\0" + self.address)
        listener.listen(8)
        self.owner, theirs = socket.socketpair()
        self._pages = os.memfd_create("pages")
        os.ftruncate(self._pages, PAGE_BYTES)
        self.watchdog = Watchdog({
            "num_ranks": 1, "failure_timeout_s": 600.0,
            "owner_pid": os.getpid(), "listener": listener.detach(),
            "owner_link": theirs.detach(), "pages": self._pages, "hang_report_s": 1.0, "owner_stays": False,
        })  # fmt: skip
        self.watchdog._tick_s = 0.0

    def end(self) -> None:
        watchdog = self.watchdog
        for rank in watchdog._ranks:
            rank.process.close()
        for closable in (*watchdog._connections, watchdog._owner_link, watchdog._owner, watchdog._listener,
                         watchdog._selector, self.owner):  # fmt: skip
            closable.close()
        watchdog._pages.close()
        os.close(self._pages)


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    guarded = Guarded()
    yield guarded
    guarded.end()


def test_a_rank_that_is_started_when_another_has_its_place_ends_the_job_and_not_the_guardian(guarded: Guarded) -> None:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\0" + guarded.address)
    client = Connection(sock)
    client.send("hello", rank=7)
    assert eventually(lambda: guarded.watchdog.turn() or guarded.watchdog._connections)
    Connection(guarded.owner).send("started", rank=0, pid=os.getpid())
    guarded.watchdog.turn()
    assert guarded.watchdog._shutdown is not None
    assert "rank 0" in (what := guarded.watchdog._shutdown.failure.what)
    assert "one too many" in what
    client.close()


def test_a_thread_that_cannot_be_started_ends_no_guardian(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """At pids.max of a container: the guardian ended, and all ranks with it."""

    def refuse(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert not done_within(1.0, lambda: None)
    print_text("shown")
    assert capfd.readouterr().err == "shown"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_that_nobody_reads_does_not_stop_the_guardian(is_terminal: bool) -> None:
    """Its standard error is a pipe that is full, or a terminal that has room for a few bytes only: select is ready."""
    read, write = os.openpty() if is_terminal else os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(write, b"x" * 64):
            pass
    while is_terminal and not select.select([], [write], [], 0.05)[1]:
        os.read(read, 64)
    os.set_blocking(write, True)
    saved = os.dup(2)
    os.dup2(write, 2)
    try:
        since_s = time.monotonic()
        print_text("text" * 100)
        assert time.monotonic() - since_s < 5
    finally:
        os.dup2(saved, 2)
        for descriptor in (saved, write, read):
            os.close(descriptor)
    assert eventually(lambda: not any(t.name == "guardian-may-block" for t in threading.enumerate()))
