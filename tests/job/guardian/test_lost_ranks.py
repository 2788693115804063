"""A rank that has declared that it can be lost: its end is one line in the terminal, and the job goes on."""

import os
import re
import signal
import time

import pytest

from tests.job.guardian.job import WORK, Job, eventually, go_on, is_alive, line_of
from tests.job.guardian.test_end_of_run import FINISH, FORKS
from tests.job.guardian.test_host_links import two_hosts

pytestmark = pytest.mark.launch

DECLARES = "client.can_be_lost(); client.flight_recorder.completed(7); "
RAISES = "client.failed(Failure('raised ValueError: spoilt', 1, 'h', os.getpid(), 7)); "


@pytest.mark.parametrize(
    ("how", "code", "what"),
    [
        ("os.kill(os.getpid(), 9)", -9, "was ended by SIGKILL"),
        ("os._exit(3)", 3, "ended with exit status 3"),
        (f"{RAISES}client.leave(); sys.exit(1)", 1, "raised ValueError: spoilt"),
        ("import threading; threading.Timer(0.3, os._exit, [4]).start(); client.finish()", 4, "exit status 4"),
    ],
)
def test_the_job_goes_on_without_it(how: str, code: int, what: str, capfd: pytest.CaptureFixture[str]) -> None:
    with Job(FINISH, DECLARES + how, FINISH) as job:
        printed = job.ends(0, code, 0)
        assert [printed[0], printed[2]] == ["finished True\n"] * 2
    line = rf"The job goes on without a rank: rank 1 \(host \S+, pid {job.ranks[1].pid}, last completed step 7\) .*"
    err = capfd.readouterr().err
    assert re.fullmatch(line + re.escape(what) + "\n", err), err


def test_the_end_of_rank_0_or_of_a_rank_that_has_not_declared_itself_is_the_jobs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    refused = "exec('try: client.can_be_lost()\\nexcept ValueError: os._exit(5)')"
    with Job(refused, DECLARES + WORK, WORK) as job:
        job.ends(5, 1, 1)
    assert "The job failed: rank 0 " in capfd.readouterr().err
    with Job(WORK, DECLARES + "os._exit(3)", "time.sleep(1); os._exit(6)") as job:
        job.ends(1, 3, 6)
    err = capfd.readouterr().err
    assert "The job goes on without a rank: rank 1 " in err
    assert "The job failed: rank 2 " in err


def test_ctrl_c_ends_the_job_whichever_rank_it_comes_to_first(capfd: pytest.CaptureFixture[str]) -> None:
    told = "client.failed(Failure('was interrupted (SIGINT)', 1, signal=2)); sys.exit(1)"
    with Job(WORK, DECLARES + told) as job:
        job.ends(1, 1)
    assert "The job failed: rank 1 " in capfd.readouterr().err


def test_its_workers_go_with_it_while_the_others_work() -> None:
    with Job("sys.stdin.readline(); " + FINISH, "client.can_be_lost()\n" + FORKS) as job:
        first, rank = job.ranks
        lines = [line_of(rank).split() for _ in range(3)]
        workers = [int(pid) for kind, pid in lines if kind == "worker"]
        try:
            time.sleep(0.5)  # the guardian looks several times a second
            rank.kill()
            assert eventually(lambda: not any(is_alive(pid) for pid in workers))
            assert first.poll() is None
            go_on(first)
            assert first.communicate(timeout=60)[0] == "finished True\n"
        finally:
            for pid in [int(pid) for _, pid in lines]:
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)


def test_one_that_fails_and_does_not_end_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    with Job(FINISH, DECLARES + RAISES + "time.sleep(600)", failure_timeout_s=2.0) as job:
        job.ends(0, -signal.SIGKILL)
    assert capfd.readouterr().err.count("\n") == 1


def test_a_host_whose_ranks_are_all_lost_is_waited_for_by_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    with two_hosts(FINISH, DECLARES + "os._exit(3)") as (one, two):
        assert one.outcome() == ([0], ["finished True\n"])
        two.ends(3)
    assert capfd.readouterr().err.startswith("The job goes on without a rank: rank 1 ")
