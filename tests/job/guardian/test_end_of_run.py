"""Who may leave when, what a second Ctrl-C does, and what must not outlive its rank."""

import os
import signal
import subprocess
import sys
import time

import pytest

from lightning_multigpu.job.guardian.ranks import Workers
from tests.job.guardian.job import WORK, Job, eventually, go_on, is_alive, line_of

pytestmark = pytest.mark.launch

FINISH = "failure = client.finish(); print('finished', failure is None, flush=True); client.leave()"


def test_nobody_leaves_before_all_have_come_to_the_end() -> None:
    with Job(FINISH, f"print('late', flush=True); sys.stdin.readline(); {FINISH}") as job:
        late = job.ranks[1]
        assert line_of(late) == "late\n"
        with pytest.raises(subprocess.TimeoutExpired):
            job.ranks[0].wait(0.7)
        go_on(late)
        printed = job.ends(0, 0)
        assert [text.strip() for text in printed] == ["finished True"] * 2


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("os._exit(0)", "ended with exit status 0 before its run was over"),
    ],
)
def test_a_rank_that_does_not_come_to_the_end_is_everybodys_failure(
    how: str, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with Job(FINISH, f"time.sleep(0.5); {how}") as job:
        assert "finished False" in job.outcome()[1][0]
    assert f"rank 1 (host {os.uname().nodename}" in (err := capfd.readouterr().err)
    assert what in err


RESTS = "client.finish(); client.rest(); "
AGAIN = "client.begin(client._on_failure, failure_timeout_s=4.0, hang_report_s=None); "


def test_a_rank_that_ends_between_two_runs_is_a_failure_of_the_second_run(capfd: pytest.CaptureFixture[str]) -> None:
    begins = f"{RESTS}print('rests', flush=True); sys.stdin.readline(); {AGAIN}{WORK}"
    with Job(begins, f"{RESTS}os.kill(os.getpid(), 9)") as job:
        first, second = job.ranks
        assert line_of(first) == "rests\n"
        assert second.wait(60) == -signal.SIGKILL
        time.sleep(0.5)
        assert not capfd.readouterr().err, "as long as nobody needs it"
        printed = first.communicate("\n", timeout=60)[0]
        assert "rank 1 (" in printed
        assert "was ended by SIGKILL" in printed
        assert first.returncode == 1
    assert "was ended by SIGKILL" in capfd.readouterr().err


def test_a_second_interrupt_of_one_rank_ends_the_others_too(capfd: pytest.CaptureFixture[str]) -> None:
    blocked = "import ctypes; ctypes.PyDLL(None).sleep(60)"  # it cannot end by itself
    told = "client.signalled(130, 1); time.sleep(0.5); client.signalled(130, 2); time.sleep(60)"
    with Job(told, blocked, failure_timeout_s=50) as job:
        job.ends(130, -signal.SIGKILL)
    assert capfd.readouterr().err.count("Another Ctrl-C ends it at once.") == 1


@pytest.mark.parametrize("acts", [False, True])
def test_ranks_act_on_a_signal_in_time(acts: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """A save after it may take any time."""
    signalled = "client.signalled(143, 1); " + "client.signalled(143, 0); time.sleep(3); client.leave()" * acts
    with Job(signalled + WORK * (not acts), f"time.sleep(3); {FINISH}" if acts else WORK, failure_timeout_s=2) as job:
        job.ends(*(0, 0) if acts else (1, 1))
    failed = "The job failed: the ranks have agreed on no batch within 2 s after SIGTERM (host "
    assert capfd.readouterr().err.startswith(failed) is not acts


def test_a_second_sigterm_while_a_rank_raises_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    """The rank was to print the failure, ended at once, and nobody said why."""
    raises = "client.failed(Failure('was interrupted (SIGTERM)', 0, signal=15)); client.signalled(143, 2); "
    with Job(f"{raises}time.sleep(60)", "time.sleep(60)", failure_timeout_s=50) as job:
        job.ends(143, 143)
    assert (
        capfd.readouterr().err.splitlines()[-1].startswith("The job failed: a second SIGTERM has ended the job at once")
    )


FORKS = """
for turn in range(2):
    if os.fork() == 0:
        os.write(1, f"worker {os.getpid()}\\n".encode())
        time.sleep(600)
other = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
os.write(1, f"other {other}\\n".encode())
told.wait(60)
"""


def test_workers_end_with_their_rank() -> None:
    with Job(WORK, FORKS) as job:
        rank = job.ranks[1]
        lines = [line_of(rank).split() for _ in range(3)]
        workers = [int(pid) for kind, pid in lines if kind == "worker"]
        (other,) = [int(pid) for kind, pid in lines if kind == "other"]
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                rank.wait(0.6)  # the guardian looks several times a second
            rank.kill()
            job.ranks[0].communicate(timeout=60)
            assert eventually(lambda: not any(is_alive(pid) for pid in workers))
            assert job.guardian_ends()
            assert is_alive(other), "a program of its own, which may be there to outlive the run"
        finally:
            for pid in (*workers, other):
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)


def test_a_rank_is_nobodys_worker() -> None:
    """Lightning's launcher starts the other ranks from the first, with the same command line."""
    code = "import os, time; child = os.fork(); child and os.write(1, b'%d\\n' % child); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as first:
        second = int(line_of(first))
        try:
            workers = Workers(first.pid)
            workers.note({second})
            assert workers.end(set())
            workers.note(set())
            assert workers.end({second}), "it has introduced itself since"
            assert is_alive(second)
            assert not workers.end(set()), "one is left at first"
            assert eventually(lambda: workers.end(set()))
        finally:
            for pid in (second, first.pid):
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)
