"""The guardian sees what ranks cannot say themselves, ends what is left, and leaves in peace whoever only is slow."""

import os
import signal
import subprocess
import sys

import pytest

from lightning_multigpu.job.guardian import Guardian
from tests.job.guardian.job import WORK, Job, eventually, is_alive, line_of, start_rank

pytestmark = pytest.mark.launch


def test_a_rank_that_hangs_on_its_way_to_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    joins = "client.joining(0.5); client.joining(None); " + WORK
    with Job(joins, "client.joining(0.5); time.sleep(60)", failure_timeout_s=2.0) as job:
        job.ends(1, -signal.SIGKILL)
    err = capfd.readouterr().err
    assert "rank 1 (" in err, "and not rank 0, which has joined"
    assert "has not joined the others in time (join_timeout_s)" in err


def test_after_leaving_an_exit_status_means_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with Job("time.sleep(0.5); client.leave()", "client.leave(); os._exit(3)") as job:
        printed = job.ends(0, 3)
        assert printed == ["", ""]
    assert capfd.readouterr().err == ""


def test_who_does_not_end_when_told_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    with Job("time.sleep(60)", "os._exit(3)", failure_timeout_s=2.0) as job:
        job.ends(-signal.SIGKILL, 3)
    assert capfd.readouterr().err.startswith("The job failed: rank 1 (")


def test_the_end_of_the_guardian_is_told_and_ends_the_ranks() -> None:
    with Job(WORK, "time.sleep(60)", failure_timeout_s=2.0) as job:
        os.kill(job.guardian.pid, signal.SIGKILL)
        printed = job.ends(1, -signal.SIGKILL)
        for text in printed:
            assert f"the guardian (pid {job.guardian.pid}) has ended" in text


def test_signals_to_the_whole_job_do_not_end_the_guardian(capfd: pytest.CaptureFixture[str]) -> None:
    with Job("time.sleep(0.5); client.leave()") as job:
        assert os.getpgid(job.guardian.pid) == os.getpgid(0), "it sees Ctrl-C"
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGUSR1):
            os.kill(job.guardian.pid, number)
        job.ends(0)
    assert capfd.readouterr().err == ""


def test_a_failure_is_shown_once_with_the_advice_of_the_first_rank(capfd: pytest.CaptureFixture[str]) -> None:
    """Each rank printed it, torchrun's SIGTERM cut the first one off, and the guardian stayed silent."""
    leaves = "told.wait(60); time.sleep({rank} / 4); print(client.leave_failed_run('Resume with {rank}')); sys.exit(1)"
    with Job(leaves.format(rank=0), "os._exit(3)", leaves.format(rank=2)) as job:
        assert all(text.endswith("True\n") for text in job.outcome()[1][::2]), "no rank ends before it is shown"
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("The job failed: rank 1 (")
    assert lines[1] == "Resume with 0"


@pytest.mark.parametrize("status", [0, 7])
def test_what_has_been_started_is_watched_before_it_introduces_itself(status: int) -> None:
    """A script that leaves one rank early kept the others waiting for ``join_timeout_s``, ten minutes by default."""
    guardian = Guardian.start(num_ranks=2)
    code = f"import os, sys; sys.stdin.readline(); os._exit({status})"
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE, text=True)
    guardian.started(1, child.pid)
    rank = start_rank(0, f"client.joining(600.0); {WORK}", guardian.address)
    assert line_of(rank) == "ready\n"
    child.communicate("go\n", timeout=60)
    guardian.ended(1, child.returncode)
    printed = rank.communicate("go\n", timeout=60)[0]
    assert "rank 1" in printed
    assert f"ended with exit status {status}" in printed
    assert eventually(lambda: not is_alive(guardian.pid))
    guardian.stop()
