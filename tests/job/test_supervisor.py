"""The supervisor of ft_ddp, with ranks that do not train."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from torch.distributed import HashStore

from lightning_multigpu._torchft import start_lighthouse
from lightning_multigpu.job import supervisor
from tests.job import supervised_script
from tests.launch.job import Job, assert_none_left
from tests.world import free_port

pytestmark = pytest.mark.launch

DEADLINE_S = 40.0  # a host that is gone is waited for longer


class Supervised(Job):
    """The script on each of some hosts, all of them this machine."""

    def begin(self, ranks: int, *plan: str, hosts: int = 1, **variables: str) -> None:
        """Starts it on all hosts; each host has so many ranks."""
        if hosts > 1:
            variables |= {"NUM_NODES": str(hosts), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        command = [sys.executable, "-m", supervised_script.__name__, str(ranks), *plan]
        options = {"cwd": self.directory, "start_new_session": True}  # so that a process group is its own
        self.begin_host = lambda node: self.start(
            None, command, {**variables, **({"NODE_RANK": str(node)} if hosts > 1 else {})}, **options
        )
        for node in range(hosts):
            self.begin_host(node)

    def until(self, condition: Callable[[], object]) -> None:
        """Waits."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self._outputs()
            time.sleep(0.02)

    def starts(self) -> dict[str, int]:
        """The process of each "rank:start" so far."""
        path = self.directory / "starts"
        lines = path.read_text().splitlines() if path.exists() else []
        return {start: int(pid) for start, pid in map(str.split, lines)}

    def signal(self, number: int) -> None:
        """As a terminal does."""
        os.killpg(self.processes[0].pid, number)

    def finish(self, index: int = 0) -> int:
        """Lets the ranks end, waits for the end of all processes, and returns the exit status of a host."""
        (self.directory / "end").touch()
        return self.end(index)

    def end(self, index: int = 0) -> int:
        """Waits for the end of all processes, and returns the exit status of a host."""
        status = self.processes[index].wait(DEADLINE_S)
        for process in self.processes:
            process.wait(DEADLINE_S)
        assert_none_left(str(self.directory), self._outputs())
        return int(status)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Supervised]:
    with Supervised(tmp_path) as started:
        yield started


def test_lost_ranks_are_started_again_one_by_one(job: Supervised) -> None:
    job.begin(3, "0:0:is killed", "1:0:raises", "2:0:is stopped", "0:1:is killed")
    job.until(lambda: {"0:2", "1:1", "2:1"} <= job.starts().keys())
    assert job.finish() == 0
    assert sorted(job.starts()) == ["0:0", "0:1", "0:2", "1:0", "1:1", "2:0", "2:1"]
    output = job.output(0)
    for line in (
        "rank 0 (host {}, pid {}) was ended by SIGKILL, and is started again (1 of 3)",
        "rank 0 (host {}, pid {}) was ended by SIGKILL, and is started again (2 of 3)",
        "rank 2 (host {}, pid {}) was stopped for 1 s, and is started again (1 of 3)",
    ):
        first = line.split()[1] + ":" + ("1" if "(2 of" in line else "0")
        assert line.format(os.uname().nodename, job.starts()[first]) in output
    assert output.count("OSError: the data are spoilt, and is started again (1 of 3)") == 1
    assert output.count("Traceback") == 1


def test_an_exception_of_all_ranks_ends_the_job_with_one_message(job: Supervised) -> None:
    job.begin(2, "0:*:raises", "1:*:raises")
    assert job.end() == 1
    assert len(job.starts()) == 2
    assert job.output(0).count("Traceback") == job.output(0).count("(host ") == 1
    assert "raised OSError: the data are spoilt, as every rank of this host did" in job.output(0)


def test_ranks_that_never_come_to_the_fit_end_the_job(job: Supervised) -> None:
    job.begin(2, "0:*:leaves early", "1:*:leaves early")
    assert job.end() == 3
    assert len(job.starts()) == 2


def test_the_only_rank_of_a_host_is_started_once_more(job: Supervised) -> None:
    job.begin(1, "0:*:raises")
    assert job.end() == 1
    assert len(job.starts()) == 2


@pytest.mark.parametrize("others", ["", "is killed"])
def test_a_rank_that_is_lost_again_and_again(job: Supervised, others: str) -> None:
    job.begin(2, "0:*:is killed", f"1:*:{others}", MAX_RESTARTS="1")
    job.until(lambda: "rank 0" in job.output(0) and "is not started again: max_restarts=1" in job.output(0))
    assert job.finish() == (128 + signal.SIGKILL if others else 0)
    assert len(job.starts()) == (4 if others else 3)


def test_a_rank_that_fails_after_the_fit_decides_the_status(job: Supervised) -> None:
    job.begin(2, "0:0:fails after the fit")
    job.until(lambda: len(job.starts()) == 2)
    assert job.finish() == 1
    assert len(job.starts()) == 2
    assert "and is not started again: the fit is over" in job.output(0)


def test_a_rank_that_leaves_at_sigterm_and_another_trainer(job: Supervised) -> None:
    job.begin(2, "0:0:leaves", "1:0:makes another Trainer")
    job.until(lambda: "and has left" in job.output(0))
    assert job.finish() == 1
    assert len(job.starts()) == 2
    assert "devices=3 and num_nodes=1 make 3 ranks, and LightningEnvironment has 2" in job.output(0)


def test_signals_reach_each_rank_once_and_the_second_ends_all(job: Supervised) -> None:
    job.begin(2, "0:0:notes signals", "1:0:notes signals")
    job.until(lambda: all((job.directory / f"ready{rank}").exists() for rank in range(2)))
    every = [psutil.Process(pid) for pid in (job.processes[0].pid, *job.starts().values())]
    for number, stopped in (signal.SIGTSTP, True), (signal.SIGCONT, False):  # Ctrl-Z, and fg
        job.signal(number)
        job.until(lambda stopped=stopped: {each.status() == psutil.STATUS_STOPPED for each in every} == {stopped})
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
        job.signal(number)
        job.until(lambda number=number: job.output(0).count(f"got {number}") == 2)
    time.sleep(0.4)
    job.signal(signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM
    assert job.output(0).count(" got ") == 6
    assert len(job.starts()) == 2


def test_no_rank_is_started_after_ctrl_c(job: Supervised) -> None:
    job.begin(2, "0:0:is killed", PAUSE_S="10")
    job.until(lambda: len(job.starts()) == 2 and not psutil.pid_exists(job.starts()["0:0"]))
    job.signal(signal.SIGINT)
    assert job.end() == 1
    assert len(job.starts()) == 2


def test_the_pause_before_a_start_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])  # that of a process of pytest's is none that ranks could run
    host = supervisor.Supervisor(supervised_script.launcher_of(2)._run, HashStore(), {}, max_restarts=10)
    rank, pauses_s = host._ranks[0], []
    for starts in range(1, 7):
        rank.process, rank.told, rank.starts = Mock(pid=1), os.memfd_create("told"), starts
        rank.begun_s = time.monotonic()
        host._has_ended(rank, -signal.SIGKILL)
        assert rank.due_s is not None
        pauses_s.append(rank.due_s - rank.ended_s)
    assert pauses_s == pytest.approx([2, 4, 8, 16, 30, 30])


def test_a_killed_supervisor_takes_its_ranks_with_it(job: Supervised) -> None:
    job.begin(2, "0:0:is stopped", "1:0:hangs")
    job.until(lambda: len(job.starts()) == 2)
    os.kill(job.starts()["0:0"], 0)
    job.processes[0].kill()
    assert job.end() == -signal.SIGKILL


def test_the_first_host_waits_for_the_others(job: Supervised) -> None:
    """Their ranks need its lighthouse."""
    job.begin(1, "0:*:leaves", "1:0:is killed", hosts=2)
    job.until(lambda: "and has left" in job.output(0) and "1:1" in job.starts())
    time.sleep(0.5)
    assert job.processes[0].poll() is None
    assert job.finish(1) == 0


def test_a_host_that_is_lost_comes_back(job: Supervised) -> None:
    job.begin(1, hosts=2)
    job.until(lambda: {"0:0", "1:0"} <= job.starts().keys())
    former = job.starts()["1:0"]
    job.processes[1].kill()
    job.processes[1].wait()
    job.begin_host(1)
    job.until(lambda: job.starts()["1:0"] != former)
    assert job.finish(2) == 0
    assert [each.poll() for each in job.processes] == [0, -signal.SIGKILL, 0]


def test_without_the_first_host_the_others_end(job: Supervised) -> None:
    job.begin(1, "1:0:hangs", hosts=2)
    job.until(lambda: len(job.starts()) == 2)
    job.processes[0].kill()
    assert job.end(1) == 1
    assert "The job failed: host 0, which has the lighthouse, is gone" in job.output(1)


def test_ranks_of_another_launcher_have_no_supervisor(job: Supervised) -> None:
    job.begin(2, LOCAL_RANK="1", WORLD_SIZE="2")
    job.until((job.directory / "starts").exists)
    assert job.finish() == 0
    assert job.starts() == {"1:None": job.processes[0].pid}


@pytest.mark.parametrize("how", ["-c", "notebook"])
def test_no_script_to_run_again(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["-c" if how == "-c" else "program.py"])
    monkeypatch.setattr(supervisor, "IS_INTERACTIVE", how != "-c")
    monkeypatch.setattr(LightningEnvironment, "creates_processes_externally", False)
    with pytest.raises(ValueError, match="there is no script that lost ranks could run again"):
        supervised_script.launcher_of(2)


def test_torchft_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft.coordination", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-multigpu\[ft\]'"):
        start_lighthouse("127.0.0.1", straggler_timeout_s=60, heartbeat_timeout_s=1)
