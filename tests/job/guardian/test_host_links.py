"""Guardians of two hosts; here both are on this machine, and meet over its loopback interface."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.job.guardian.job import WORK, Job, go_on, is_alive, line_of

pytestmark = pytest.mark.launch

SECRET = "ab" * 32
LISTEN = f"print(client.listen_for_hosts('127.0.0.1', num_nodes=2, secret='{SECRET}'), flush=True); "
JOIN = "print(client.join_hosts('127.0.0.1', {port}, node_rank=1, secret='{secret}'), flush=True); "
LEAVE_LATER = "time.sleep(2); client.leave()"
LEAVE = "client.leave()"


@contextmanager
def two_hosts(
    first: str, second: str, *, failure_timeout_s: float = 6.0, hang_report_s: float | None = None
) -> Iterator[tuple[Job, Job]]:
    """A rank on each of two hosts; the second is rank 1. Their statements run, and this yields, once they have met."""
    first = f"{LISTEN}sys.stdin.readline(); {first}"
    with Job(first, failure_timeout_s=failure_timeout_s, hang_report_s=hang_report_s) as one:
        port = line_of(one.ranks[0]).strip()
        join = JOIN.format(port=port, secret=SECRET)
        with Job(join + second, first_rank=1, failure_timeout_s=failure_timeout_s, hang_report_s=hang_report_s) as two:
            assert line_of(two.ranks[0]) == "None\n"
            go_on(one.ranks[0])
            yield one, two


def test_a_rank_that_is_killed_ends_the_ranks_of_both_hosts(capfd: pytest.CaptureFixture[str]) -> None:
    with two_hosts(WORK, "client.flight_recorder.completed(7); os.kill(os.getpid(), 9)") as (one, two):
        codes, printed = one.outcome()
        assert codes == [1]
        assert f"told: rank 1 (host {os.uname().nodename}, pid {two.ranks[0].pid}, last completed step 7)" in printed[0]
        assert two.outcome()[0] == [-signal.SIGKILL]
        assert one.guardian_ends()
        assert two.guardian_ends()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2, "once in the terminal of each host"
    assert len(set(lines)) == 1


@pytest.mark.parametrize("node", [0, 1])
def test_the_end_of_a_guardian_is_seen_on_both_hosts(node: int) -> None:
    with two_hosts(WORK, WORK) as jobs:
        os.kill(jobs[node].guardian.pid, signal.SIGKILL)
        for job in jobs:
            codes, printed = job.outcome()
            assert codes == [1]
            assert "the guardian" in printed[0]
            assert "has ended" in printed[0]
        assert jobs[1 - node].guardian_ends()


@pytest.mark.parametrize("node", [0, 1])
def test_a_silent_host_is_a_failure(node: int, capfd: pytest.CaptureFixture[str]) -> None:
    """A cut link and a host without power look the same from here: nothing is heard, and nothing is closed."""
    with two_hosts(WORK, WORK) as jobs:
        # All of the host: a rank alone would end its silent guardian, which closes the connection.
        jobs[node].ranks[0].send_signal(signal.SIGSTOP)
        os.kill(jobs[node].guardian.pid, signal.SIGSTOP)
        codes, printed = jobs[1 - node].outcome()
        assert codes == [1]
        names = [f"node {number} (host {os.uname().nodename})" for number in (1 - node, node)]
        assert f"told: {names[0]} has received nothing from {names[1]} for" in printed[0]
        assert jobs[1 - node].guardian_ends()
        os.kill(jobs[node].guardian.pid, signal.SIGCONT)
        jobs[node].ranks[0].send_signal(signal.SIGCONT)
        assert jobs[node].outcome()[0] == [1], "its connection is gone"
        assert jobs[node].guardian_ends()


@pytest.mark.parametrize(("first", "second"), [(LEAVE_LATER, LEAVE), (LEAVE, LEAVE_LATER)])
def test_hosts_that_finish_at_different_times(first: str, second: str, capfd: pytest.CaptureFixture[str]) -> None:
    with two_hosts(first, second) as (one, two):
        assert one.outcome()[0] == [0]
        assert two.outcome()[0] == [0]
        assert one.guardian_ends()
        assert two.guardian_ends()
    assert capfd.readouterr().err == ""


FINISH = "failure = client.finish(); print('finished', failure is None, flush=True); client.leave()"


@pytest.mark.parametrize("late", [0, 1])
def test_no_host_leaves_before_all_have_come_to_the_end(late: int) -> None:
    statements = [FINISH, FINISH]
    statements[late] = f"sys.stdin.readline(); {FINISH}"
    with two_hosts(*statements) as jobs:
        with pytest.raises(subprocess.TimeoutExpired):
            jobs[1 - late].ranks[0].wait(1.5)
        go_on(jobs[late].ranks[0])
        for job in jobs:
            assert job.outcome() == ([0], ["finished True\n"])
            assert job.guardian_ends()


@pytest.mark.parametrize("node", [0, 1])
def test_a_second_interrupt_ends_all_hosts_at_once(node: int) -> None:
    statements = ["time.sleep(60)", "time.sleep(60)"]
    statements[node] = "time.sleep(2); client.counts_interrupts(); client.signalled(130, 2); time.sleep(60)"
    with two_hosts(*statements, failure_timeout_s=50.0) as jobs:
        for job in jobs:
            assert job.outcome()[0] == [130]
            assert job.guardian_ends()


def test_a_host_that_is_stopped_as_a_whole_is_a_failure_because_others_wait() -> None:
    with two_hosts(WORK, WORK, failure_timeout_s=2.0) as (one, two):
        two.ranks[0].send_signal(signal.SIGSTOP)
        assert one.outcome()[0] == [1]
        assert two.outcome()[0] == [-signal.SIGKILL]


def test_another_job_is_refused() -> None:
    with Job(LISTEN + WORK) as one:
        port = line_of(one.ranks[0]).strip()
        with Job(JOIN.format(port=port, secret="cd" * 32), first_rank=1) as two:
            codes, printed = two.outcome()
            assert codes == [1]
            assert "told: the guardian of node 0 has refused that of node 1" in printed[0]
            assert "its secret is not this job's" in printed[0]
            assert two.guardian_ends()
        assert is_alive(one.guardian.pid), "a stranger is nobody's loss"
        os.kill(one.guardian.pid, signal.SIGKILL)
        assert one.outcome()[0] == [1]


RESTS = "client.finish(); client.rest(); "
AGAIN = "client.begin(client._on_failure, failure_timeout_s=6.0, hang_report_s=None); "
ENDS = "print('finished', client.finish() is None, flush=True); client.leave()"


def test_a_second_run_of_all_hosts() -> None:
    with two_hosts(f"{RESTS}{AGAIN}{ENDS}", f"client.finish(); time.sleep(1); client.rest(); {AGAIN}{ENDS}") as jobs:
        for job in jobs:
            assert job.outcome() == ([0], ["finished True\n"])
            assert job.guardian_ends()


@pytest.mark.parametrize("node", [0, 1])
def test_a_host_whose_rank_has_ended_between_two_runs_fails_the_second(node: int) -> None:
    statements = [f"{RESTS}time.sleep(2); {AGAIN}{WORK}"] * 2
    statements[node] = f"{RESTS}os.kill(os.getpid(), 9)"
    with two_hosts(*statements) as jobs:
        codes, printed = jobs[1 - node].outcome()
        assert codes == [1]
        assert ("was ended by SIGKILL" if node == 0 else "the ranks of node 1") in printed[0]
        for job in jobs:
            assert job.guardian_ends()
