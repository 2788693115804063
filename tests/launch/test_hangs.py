"""Ranks that wait are told of through the real strategy; a report ends the run if no rank can go on."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.job.guardian.job import eventually
from tests.launch import hang_script
from tests.launch.job import Job
from tests.world import free_port

pytestmark = pytest.mark.launch

END = "The wait that was reported has ended"
REPORT_END = "all threads"  # in the last line of a report
DEADLINE_S = 150.0


class HangingJob(Job):
    """A job of two ranks."""

    def __init__(self, directory: Path, method: str, how: str, variables: Mapping[str, str] | None = None) -> None:
        super().__init__(directory)
        command = [sys.executable, "-m", hang_script.__name__, "popen" if method == "external" else method, how]
        each: list[dict[str, str]] = [{}]
        if method == "external":
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0", "WORLD_SIZE": "2"}
            each = [{**meeting, "LOCAL_RANK": str(rank)} for rank in range(2)]
        for own in each:
            self.start(None, command, {"GO_ON": str(directory), **(variables or {}), **own})

    @property
    def text(self) -> str:
        return "".join(self.output(index) for index in range(len(self.processes)))

    def reports(self, times: int = 1) -> list[str]:
        """The reports so far, once there are so many; pid and all."""
        eventually(lambda: self.text.count(REPORT_END) >= times or not self._is_running(), DEADLINE_S)
        assert self.text.count(REPORT_END) >= times, self.text[-5000:]
        return re.findall(r"No progress for.*?all threads", self.text, flags=re.DOTALL)

    def ends_when_rank_1_is_killed(self) -> str:
        """Kills the rank that the last report names, and returns what is printed from there on."""
        before = len(self.text)
        pid = re.findall(r"^Rank 1 \(host \S+, pid (\d+)", self.text, flags=re.MULTILINE)[-1]
        os.kill(int(pid), signal.SIGKILL)
        assert eventually(lambda: not self._is_running(), DEADLINE_S), self.text[-5000:]
        eventually(lambda: "The job failed" in self.text or "Error" in self.text[before:], 10)
        return self.text[before:]

    def ends_by_itself(self) -> str:
        """Waits for the end, and returns the line about the failure."""
        assert eventually(lambda: not self._is_running(), DEADLINE_S), self.text[-5000:]
        assert all(process.returncode not in (0, -signal.SIGKILL) for process in self.processes)
        found = re.findall(r"The job failed: (.*)", self.text)
        assert found, self.text[-5000:]
        return str(found[0])

    def _is_running(self) -> bool:
        return any(process.poll() is None for process in self.processes)


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HangingJob]:
    with HangingJob(tmp_path / "job", *request.param) as started:
        yield started


@pytest.mark.parametrize("job", [("popen", "in turn")], indirect=True)
def test_waits_that_end_and_one_that_does_not(job: HangingJob) -> None:
    """Code that holds the interpreter lock, a slow save, and a rank that never comes to a barrier in validation."""
    (locked,) = job.reports()
    assert re.search(r"Rank 0 waits in all_reduce #2 of group data for \d+ s; rank 1 has not come: it is at "
                     r"launch/hang_script.py:\d+ in hold_interpreter_lock\.", locked), locked  # fmt: skip
    (job.directory / "interpreter lock").touch()
    saving = job.reports(2)[1]
    assert re.search(r"Rank 1 waits in barrier #\d+ of group world \(launch/hang_script.py:\d+ in on_train_batch_end\)",
                     saving), saving  # fmt: skip
    assert re.search(r"rank 0 has not come: it is at launch/hang_script.py:\d+ in wait_for\.", saving), saving
    assert job.text.count(END) == 1
    (job.directory / "slow save").touch()
    hanging = job.reports(3)[2]
    where = r"launch/hang_script.py:\d+ in validation_step"
    assert re.search(rf"Rank 0 waits in barrier #\d+ of group world \({where}\) for \d+ s; rank 1 has not come: it is "
                     r"at tests/faults.py:\d+ in hang\.", hanging), hanging  # fmt: skip
    assert job.text.count(END) == 2
    last = job.ends_when_rank_1_is_killed()
    assert re.search(rf"Meanwhile rank 0 waited in barrier #\d+ of group world for \d+\.\d s, {where}", last), last
    assert re.search(r"rank 1 \(host \S+, pid \d+, .*was ended by SIGKILL", last), last


@pytest.mark.parametrize("job", [("spawn", "own")], indirect=True)
def test_a_collective_of_the_users_that_one_rank_calls(job: HangingJob) -> None:
    """Nothing passes the meter on that rank: its stack tells."""
    report = job.reports()[0]
    called = r"all_reduce, called at launch/hang_script.py:\d+ in wait"
    other = r"it is in another collective, all_reduce #2 of group data\."
    assert re.search(rf"Rank 0 waits in {called}; rank 1 has not come: {other}", report), report
    assert re.search(rf"rank 0 has not come: it is in another collective, {called}\.", report), report
    failure = job.ends_by_itself()
    assert re.search(rf"none can go on: rank 0 in {called}; rank 1 in all_reduce #2 of group data ", failure), failure


@pytest.mark.parametrize("job", [("external", "different")], indirect=True)
def test_two_ranks_in_different_collectives(job: HangingJob) -> None:
    """They waited until the timeout of 30 minutes, although neither could go on."""
    report = job.reports()[0]
    assert re.search(r"Rank 0 waits in barrier #\d+ of group world", report), report
    assert "Ranks wait for each other: the run ends." in report
    assert re.search(r"none can go on: rank 0 in barrier #\d+ of group world \(launch/hang_script.py:\d+ in wait\); "
                     r"rank 1 in all_reduce #2 of group data \(", job.ends_by_itself())  # fmt: skip
