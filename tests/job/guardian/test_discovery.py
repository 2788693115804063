"""Ranks that nobody of this pack has started find their guardian, and no other.

Strangers at its socket, such as other users of the host, end and slow down no job.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_multigpu.job.guardian import Failure, Guardian, GuardianClient, GuardianError
from lightning_multigpu.job.guardian.start import ADDRESS, address_of_job
from tests.job.guardian.job import REPOSITORY, SCRIPT, WORK, Job, eventually, is_alive, start_rank

pytestmark = pytest.mark.launch
JOB: dict[str, Any] = {"node_rank": 0, "attempt": 0, "variables": {}}


@pytest.fixture
def address() -> str:
    return address_of_job("127.0.0.1", os.getpid() % 60_000 + 1, **{**JOB, "attempt": time.monotonic_ns()})


@pytest.fixture
def guardian(address: str) -> Iterator[Guardian]:
    started = Guardian.start(address=address, num_ranks=2, failure_timeout_s=3)
    yield started
    started.stop()
    assert eventually(lambda: not is_alive(started.pid))


def test_ranks_of_a_host_have_one_address_and_other_jobs_hosts_and_starts_another() -> None:
    first = {"main_address": "a", "main_port": 1, **JOB}
    others: list[dict[str, Any]] = [
        {"main_port": 2}, {"main_address": "b"}, {"node_rank": 1}, {"attempt": 1},
        {"variables": {"TORCHELASTIC_RESTART_COUNT": "1"}}, {"variables": {"SLURM_JOB_ID": "4711"}},
    ]  # fmt: skip
    assert len({address_of_job(**{**first, **other}) for other in ({}, {}, *others)}) == 1 + len(others)


def test_no_guardian_comes(address: str) -> None:
    with pytest.raises(GuardianError, match=r"rank 1 finds no guardian .* within 0.2 s: .*LOCAL_RANK=0"):
        GuardianClient(address, rank=1, on_failure=print, start_timeout_s=0.2)


def test_a_guardian_of_an_earlier_job_has_time_to_end(guardian: Guardian, address: str) -> None:
    with pytest.raises(GuardianError, match="another guardian of this job is there already"):
        Guardian.start(num_ranks=2, address=address, failure_timeout_s=0.0)


def test_two_processes_claim_one_rank_while_another_is_missing(guardian: Guardian, address: str) -> None:
    told: list[Failure] = []
    client = GuardianClient(address, rank=0, on_failure=told.append)
    second = start_rank(0, "", address)
    refused = second.communicate(timeout=60)[1]
    assert f"rank 0 is the process {os.getpid()} already, and {second.pid} says that it is rank 0" in refused
    assert eventually(lambda: bool(told))
    assert f"{second.pid} says that it is rank 0" in told[0].what
    client.leave()


def test_a_rank_that_comes_after_the_failure_is_told(guardian: Guardian, address: str) -> None:
    client = GuardianClient(address, rank=0, on_failure=print)
    client.failed(Failure("raised ValueError: no such file", 0))
    client.leave()
    time.sleep(0.5)
    printed = start_rank(1, WORK, address).communicate("go\n", timeout=60)[0]
    assert "rank 0" in printed
    assert "raised ValueError: no such file" in printed


NOBODY = 65534
as_other_user = pytest.mark.skipif(os.getuid() != 0, reason="becoming another user needs root")


@as_other_user
def test_a_guardian_of_another_user_is_none(address: str) -> None:
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind("\0" + address)
        os.seteuid(NOBODY)
        try:
            squatter.listen()
        finally:
            os.seteuid(0)
        with pytest.raises(GuardianError, match=rf"belongs to a process of user {NOBODY}.*not the guardian of rank 1"):
            GuardianClient(address, rank=1, on_failure=print, start_timeout_s=0.2)
        with pytest.raises(GuardianError, match=rf"belongs to a process of user {NOBODY}.*choose another MASTER_PORT"):
            Guardian.start(address=address, num_ranks=2, failure_timeout_s=3)


@as_other_user
def test_another_container_with_the_same_network_and_user_is_refused(guardian: Guardian, address: str) -> None:
    """UNIX addresses belong to the network namespace, which containers may share with their host."""
    rank = [sys.executable, "-I", "-S", str(SCRIPT), str(REPOSITORY), "0", ""]
    ran = subprocess.run(
        ["unshare", "--pid", "--fork", *rank], env={**os.environ, ADDRESS: address}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert "the guardian's address belongs to a process of another container (PID namespace)" in ran.stderr


@as_other_user
def test_another_user_is_refused_at_once() -> None:
    with Job("sys.stdin.readline(); client.leave()") as job, socket.socket(socket.AF_UNIX) as sock:
        os.seteuid(NOBODY)  # the kernel shows the user at the time of the connection
        try:
            sock.connect("\0" + job.guardian.address)
        finally:
            os.seteuid(0)
        sock.settimeout(20)
        assert "it is a process of user 65534, and not of user 0" in sock.recv(1000).decode()
        assert sock.recv(1000) == b"", "closed"
        job.go_on()
        job.ends(0)
