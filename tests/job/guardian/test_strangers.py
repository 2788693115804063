"""Strangers at a guardian's sockets: other users of the host, and whoever reaches a port, end and slow down no job."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest

from lightning_multigpu.job.guardian import Guardian, GuardianClient, GuardianError
from tests.job.guardian.job import Job
from tests.job.guardian.test_discovery import NOBODY, as_other_user

pytestmark = pytest.mark.launch

# Until the test has done its part; then in order.
WAITS = "sys.stdin.readline(); client.leave()"


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Everything that happens meanwhile comes to the guardian in one round of its loop."""
    os.kill(pid, signal.SIGSTOP)
    yield
    os.kill(pid, signal.SIGCONT)


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


@pytest.mark.parametrize("start_timeout_s", [0.0, 0.1], ids=["of a guardian", "of a job"])
def test_a_program_that_takes_no_connections_at_the_guardians_address(start_timeout_s: float) -> None:
    """The rank "found no guardian", or its first rank "had not come"."""
    with ExitStack() as stack:
        squatter = stack.enter_context(socket.socket(socket.AF_UNIX))
        squatter.bind(f"\0squatter-{os.getpid()}")
        squatter.listen(0)
        address = squatter.getsockname()[1:].decode()
        stack.enter_context(socket.socket(socket.AF_UNIX)).connect("\0" + address)
        with pytest.raises(GuardianError, match=f"takes no connection of rank 1: its queue is full.*grep {address}"):
            GuardianClient(address, rank=1, on_failure=print, timeout_s=0.1, start_timeout_s=start_timeout_s)


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
