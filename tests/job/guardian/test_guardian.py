"""The guardian sees what ranks cannot say themselves, ends what is left, and leaves in peace whoever only is slow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_multigpu.job.guardian import Guardian
from lightning_multigpu.job.guardian.start import ADDRESS
from tests.job.guardian.job import WORK, Job, eventually, is_alive, line_of, start_rank

pytestmark = pytest.mark.launch


def message(capfd: pytest.CaptureFixture[str]) -> str:
    """What the guardian has printed."""
    return capfd.readouterr().err


def test_a_rank_killed_with_sigkill_is_named_and_the_others_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    works = "client.flight_recorder.completed(120); print('x', flush=True); told.wait(60)"
    with Job(WORK, works, directory=tmp_path) as job:
        assert line_of(job.ranks[1]) == "x\n"
        job.ranks[1].kill()
        codes, printed = job.outcome()
        assert codes == [1, -signal.SIGKILL]
        what = f"rank 1 (host {os.uname().nodename}, pid {job.ranks[1].pid}, last completed step 120)"
        assert f"told: {what} was ended by SIGKILL" in printed[0]
        assert job.guardian_ends()
    err = message(capfd)
    assert err == f"The job failed: {what} was ended by SIGKILL\n", "once, and as the last thing"
    (file,) = tmp_path.iterdir()
    assert file.name == f"failure-{os.uname().nodename}.txt"
    heading, _, text = file.read_text().partition("\n")
    assert text == err
    assert heading.startswith(time.strftime("%Y-%m-%d ")), "a later run may find it"
    assert f"1 (pid {job.ranks[1].pid})" in heading


def test_a_rank_that_hangs_on_its_way_to_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    joins = "client.joining(0.5); client.joined(); " + WORK
    with Job(joins, "client.joining(0.5); time.sleep(60)", failure_timeout_s=2.0) as job:
        assert job.outcome()[0] == [1, -signal.SIGKILL]
        assert job.guardian_ends()
    err = message(capfd)
    assert "rank 1 (" in err, "and not rank 0, which has joined"
    assert "has not joined the others in time (join_timeout_s)" in err


def test_after_leaving_an_exit_status_means_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with Job("time.sleep(0.5); client.leave()", "client.leave(); os._exit(3)") as job:
        codes, printed = job.outcome()
        assert codes == [0, 3]
        assert printed == ["", ""]
        assert job.guardian_ends()
    assert message(capfd) == ""


def test_a_stopped_rank_is_a_failure_and_does_not_outlive_it(capfd: pytest.CaptureFixture[str]) -> None:
    with Job(WORK, WORK, failure_timeout_s=2.0) as job:
        job.ranks[0].send_signal(signal.SIGSTOP)
        assert job.outcome()[0] == [-signal.SIGKILL, 1]
        assert job.guardian_ends()
    err = message(capfd)
    assert "The job failed: rank 0 (" in err
    assert "has been stopped by a signal" in err


def test_who_does_not_end_when_told_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    with Job("time.sleep(60)", "os._exit(3)", failure_timeout_s=2.0) as job:
        assert job.outcome()[0] == [-signal.SIGKILL, 3]
        assert job.guardian_ends()
    err = message(capfd)
    assert f"rank 0 (pid {job.ranks[0].pid})" in err
    assert err.splitlines()[-1].startswith("The job failed: rank 1 (")


@pytest.mark.parametrize("first", ["guardian", "ranks"])
def test_a_job_that_is_paused_as_a_whole_goes_on(first: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A laptop's lid is closed: all processes stop, and go on one after the other."""
    with Job(*["time.sleep(3); client.leave()"] * 2, failure_timeout_s=2.0) as job:
        pids = [job.ranks[0].pid, job.ranks[1].pid, job.guardian.pid]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5)
        for pid in pids[2:] if first == "guardian" else pids[:2]:
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.7)  # they see that the others are stopped
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert job.outcome()[0] == [0, 0]
        assert job.guardian_ends()
    assert message(capfd) == ""


def test_the_end_of_the_guardian_is_told_and_ends_the_ranks() -> None:
    with Job(WORK, "time.sleep(60)", failure_timeout_s=2.0) as job:
        os.kill(job.guardian.pid, signal.SIGKILL)
        codes, printed = job.outcome()
        assert codes == [1, -signal.SIGKILL], "the second ignores what it is told"
        for text in printed:
            assert f"the guardian (pid {job.guardian.pid}) has ended" in text


def test_a_stopped_guardian_is_resumed(capfd: pytest.CaptureFixture[str]) -> None:
    """By its ranks, of which one is killed meanwhile, and by the last one when it leaves."""
    with Job(WORK, "time.sleep(60)", failure_timeout_s=2.0) as job:
        os.kill(job.guardian.pid, signal.SIGSTOP)
        job.ranks[1].kill()
        assert "was ended by SIGKILL" in job.outcome()[1][0]
        assert job.guardian_ends()
    with Job("told.wait(0.1); client.leave()") as job:
        os.kill(job.guardian.pid, signal.SIGSTOP)
        assert job.outcome()[0] == [0]
        assert job.guardian_ends()
    assert message(capfd).count("The job failed") == 1


def test_signals_to_the_whole_job_do_not_end_the_guardian(capfd: pytest.CaptureFixture[str]) -> None:
    with Job("time.sleep(0.5); client.leave()") as job:
        assert os.getpgid(job.guardian.pid) == os.getpgid(0), "it sees Ctrl-C"
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGUSR1):
            os.kill(job.guardian.pid, number)
        assert job.outcome()[0] == [0]
        assert job.guardian_ends()
    assert message(capfd) == ""


def test_the_word_of_a_rank_that_raises_comes_before_its_exit_status(capfd: pytest.CaptureFixture[str]) -> None:
    fails = "client.failed(Failure('raised OwnError: spoilt', 1, traceback='Traceback: ...')); sys.exit(1)"
    with Job(WORK, fails) as job:
        codes, printed = job.outcome()
        assert codes == [1, 1]
        assert "raised OwnError: spoilt" in printed[0]
        assert "told" not in printed[1], "it knows"
        assert job.guardian_ends()
    err = message(capfd)
    assert err.startswith("Traceback: ...\nThe job failed: rank 1")


RAISES = "told.wait(60); client.may_print(); client.rest(); "


def test_a_program_that_catches_the_exception_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It may go on for longer than a failed job has."""
    with Job(f"{RAISES}time.sleep(2.5); sys.exit(1)", "os._exit(3)", directory=tmp_path, failure_timeout_s=2.0) as job:
        assert job.outcome()[0] == [1, 3]
        assert job.guardian_ends()
    assert message(capfd) == ""
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failure_is_shown_once_with_the_advice_of_the_first_rank(capfd: pytest.CaptureFixture[str]) -> None:
    """Each rank printed it, torchrun's SIGTERM cut the first one off, and the guardian stayed silent."""
    shows = RAISES + "print(client.print_failure('Resume with {rank}', waits={rank} == 0)); sys.exit(1)"
    with Job(shows.format(rank=0), "os._exit(3)", shows.format(rank=2)) as job:
        assert all(text.endswith("True\n") for text in job.outcome()[1][::2])
        assert job.guardian_ends()
    lines = message(capfd).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("The job failed: rank 1 (")
    assert lines[1] == "Resume with 0"


def test_a_rank_that_a_signal_keeps_from_showing_the_failure(capfd: pytest.CaptureFixture[str]) -> None:
    """torchrun ends the first rank as soon as another one has ended."""
    fails = "client.failed(Failure('raised Own', 1, traceback='Traceback: ...')); sys.exit(1)"
    with Job(f"{RAISES}os.kill(os.getpid(), 15)", fails) as job:
        assert job.outcome()[0] == [-signal.SIGTERM, 1]
        assert job.guardian_ends()
    first, last = message(capfd).splitlines()
    assert first == "Traceback: ..."
    assert last.startswith("The job failed: rank 1")


def test_a_rank_that_has_shown_the_failure_and_does_not_end(capfd: pytest.CaptureFixture[str]) -> None:
    """A thread of the program kept it, and the guardian waited with it for ever."""
    shows = f"{RAISES}client.print_failure('', waits=True); time.sleep(600)"
    with Job(shows, "os._exit(3)", failure_timeout_s=2.0) as job:
        assert job.outcome()[0] == [-signal.SIGKILL, 3]
        assert job.guardian_ends()
    assert message(capfd).startswith("The job failed: rank 1 (")


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
    when = "before it joined the run" if status == 0 else ""
    assert f"ended with exit status {status} {when}".rstrip() in printed
    assert eventually(lambda: not is_alive(guardian.pid))
    guardian.stop()


def test_a_guardian_ends_when_ranks_will_not_come_any_more() -> None:
    guardian = Guardian.start(num_ranks=2)
    assert is_alive(guardian.pid)
    guardian.stop()
    assert eventually(lambda: not is_alive(guardian.pid))
    assert ADDRESS not in os.environ


def test_nothing_is_left_and_the_guardian_is_small() -> None:
    with Job(WORK) as job:
        pid, address = job.guardian.pid, job.guardian.address
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "torch" not in maps
        assert "site-packages" not in maps
        assert address in Path("/proc/net/unix").read_text()
        job.ranks[0].kill()
        job.outcome()
        assert job.guardian_ends()
    assert address not in Path("/proc/net/unix").read_text()
