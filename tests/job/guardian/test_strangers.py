"""Strangers at a guardian's sockets: other users of the host, and whoever reaches a port, end and slow down no job."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from lightning_multigpu.job.guardian import Guardian, GuardianClient
from lightning_multigpu.job.guardian.protocol import MAX_STRANGER_BYTES, encode
from tests.job.guardian.job import Job, is_alive, line_of
from tests.job.guardian.test_host_links import JOIN, LISTEN, SECRET

pytestmark = pytest.mark.launch

NOBODY = 65534
as_other_user = pytest.mark.skipif(os.getuid() != 0, reason="becoming another user needs root")
# Until the test has done its part; then in order.
WAITS = "sys.stdin.readline(); client.leave()"


def resident_kb(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1])


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Everything that happens meanwhile comes to the guardian in one round of its loop."""
    os.kill(pid, signal.SIGSTOP)
    yield
    os.kill(pid, signal.SIGCONT)


def answer(stranger: socket.socket) -> bytes:
    stranger.send(encode("hello"))
    return stranger.recv(1000)


@contextmanager
def listening() -> Iterator[tuple[Job, tuple[str, int]]]:
    """Node 0 of two, and the address at which its guardian listens for the other."""
    with Job(LISTEN + WAITS, failure_timeout_s=60) as job:  # of which half is left to who says nothing
        yield job, ("127.0.0.1", int(line_of(job.ranks[0])))


def crowd(guardian: int, address: tuple[str, int], number: int) -> None:
    """Fills the guardian's table of strangers; then all of them speak in the round in which further ones come."""
    with ExitStack() as stack:

        def come() -> socket.socket:
            return stack.enter_context(socket.create_connection(address))

        strangers = [come() for _ in range(number)]
        assert b"refused" in answer(come())
        with stopped(guardian):
            for _ in range(8):  # these are let in first
                come()
            for stranger in strangers:
                with suppress(OSError):  # the first ones have made room for the last
                    stranger.send(b"x")
        assert b"refused" in answer(come()), "the guardian goes on"


def test_a_full_table_of_strangers_from_the_network_does_not_end_the_guardian() -> None:
    """One was closed in the round in which it spoke, and the ValueError ended the guardian and with it the job."""
    with listening() as (one, address):
        crowd(one.guardian.pid, address, 257)
        with Job(JOIN.format(port=address[1], secret=SECRET) + WAITS, first_rank=1, failure_timeout_s=20) as two:
            assert line_of(two.ranks[0]) == "None\n", "the other host comes in all the same"
            for job in (one, two):
                job.go_on()
                assert job.outcome()[0] == [0]


@as_other_user
def test_another_user_is_refused_at_once() -> None:
    with Job(WAITS) as job, socket.socket(socket.AF_UNIX) as sock:
        os.seteuid(NOBODY)  # the kernel shows the user at the time of the connection
        try:
            sock.connect("\0" + job.guardian.address)
        finally:
            os.seteuid(0)
        sock.settimeout(20)
        assert "it is a process of user 65534, and not of user 0" in sock.recv(1000).decode()
        assert sock.recv(1000) == b"", "closed"
        job.go_on()
        assert job.outcome()[0] == [0]


def test_little_is_read_of_a_stranger() -> None:
    """10 MiB of messages took the guardian from 12 to 225 MB, and kept it from its ranks meanwhile."""
    flood = encode("a", text="") * (1 << 19)
    with listening() as (job, address), socket.create_connection(address, timeout=20) as sock:
        before_kb = resident_kb(job.guardian.pid)
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            sock.sendall(flood)
        time.sleep(0.2)
        assert resident_kb(job.guardian.pid) - before_kb < 5_000
        assert is_alive(job.guardian.pid)


def test_a_rank_that_comes_behind_a_crowd_waits_in_line() -> None:
    """So many connections at once that the kernel takes no more: the rank was told that its guardian had ended."""
    guardian = Guardian.start(num_ranks=1, failure_timeout_s=60)
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        stack.callback(guardian.stop)
        with stopped(guardian.pid):
            with suppress(BlockingIOError):
                while True:
                    sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                    sock.setblocking(False)
                    sock.connect("\0" + guardian.address)
            coming = pool.submit(GuardianClient, guardian.address, rank=0, on_failure=print)
            time.sleep(0.3)
        coming.result(60).leave()


def test_a_stranger_that_never_ends_its_line() -> None:
    with listening() as (_, address), socket.create_connection(address, timeout=20) as sock:
        for _ in range(4):
            sock.send(b"x" * (MAX_STRANGER_BYTES // 4))
            time.sleep(0.02)
        assert sock.recv(1000) == b"", "closed"
