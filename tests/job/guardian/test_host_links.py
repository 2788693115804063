"""Guardians of two hosts; here both are on this machine, and meet over its loopback interface."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.job.guardian.job import WORK, Job, go_on, line_of
from tests.job.guardian.test_end_of_run import AGAIN, FINISH, RESTS

pytestmark = pytest.mark.launch

SECRET = "ab" * 32
LISTEN = f"print(client.listen_for_hosts('127.0.0.1', num_nodes=2, secret='{SECRET}'), flush=True); "
JOIN = "print(client.join_hosts('127.0.0.1', {port}, node_rank=1, secret='{secret}'), flush=True); "


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
            with suppress(BrokenPipeError):  # the second host may have ended the job already
                go_on(one.ranks[0])
            yield one, two


def test_a_rank_that_is_killed_ends_the_ranks_of_both_hosts(capfd: pytest.CaptureFixture[str]) -> None:
    with two_hosts(WORK, "client.flight_recorder.completed(7); os.kill(os.getpid(), 9)") as (one, two):
        printed = one.ends(1)
        assert f"told: rank 1 (host {os.uname().nodename}, pid {two.ranks[0].pid}, last completed step 7)" in printed[0]
        two.ends(-signal.SIGKILL)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2, "once in the terminal of each host"
    assert len(set(lines)) == 1


@pytest.mark.parametrize("late", [0, 1])
def test_no_host_leaves_before_all_have_come_to_the_end(late: int) -> None:
    statements = [FINISH, FINISH]
    statements[late] = f"sys.stdin.readline(); {FINISH}"
    with two_hosts(*statements) as jobs:
        with pytest.raises(subprocess.TimeoutExpired):
            jobs[1 - late].ranks[0].wait(0.8)
        go_on(jobs[late].ranks[0])
        for job in jobs:
            assert job.outcome() == ([0], ["finished True\n"])


@pytest.mark.parametrize("node", [0, 1])
def test_a_second_interrupt_ends_all_hosts_at_once(node: int) -> None:
    statements = ["time.sleep(60)", "time.sleep(60)"]
    statements[node] = "client.signalled(130, 2); time.sleep(60)"
    with two_hosts(*statements, failure_timeout_s=50.0) as jobs:
        for job in jobs:
            job.ends(130)


def test_a_second_run_of_all_hosts() -> None:
    late = f"client.finish(); time.sleep(0.5); client.rest(); {AGAIN}{FINISH}"
    with two_hosts(f"{RESTS}{AGAIN}{FINISH}", late) as jobs:
        for job in jobs:
            assert job.outcome() == ([0], ["finished True\n"])


@pytest.mark.parametrize("node", [0, 1])
def test_a_host_whose_rank_has_ended_between_two_runs_fails_the_second(node: int) -> None:
    statements = [f"{RESTS}time.sleep(1); {AGAIN}{WORK}"] * 2
    statements[node] = f"{RESTS}os.kill(os.getpid(), 9)"
    with two_hosts(*statements) as jobs:
        printed = jobs[1 - node].ends(1)
        assert f"the guardian of node {node}" in printed[0]
