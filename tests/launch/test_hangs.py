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
REPORT = re.compile(r"^No progress for.*\n(?:  .*\n)+", re.MULTILINE)
DEADLINE_S = 150.0


class HangingJob(Job):
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
        eventually(lambda: len(REPORT.findall(self.text)) >= times or not self._is_running(), DEADLINE_S)
        reports = REPORT.findall(self.text)
        assert len(reports) >= times, self.text[-5000:]
        return reports

    def ends_when_rank_1_is_killed(self) -> str:
        """Kills the rank that the last report names, and returns what is printed from there on."""
        before = len(self.text)
        pid = re.findall(r"^  1 +\S+ +(\d+) ", self.text, flags=re.MULTILINE)[-1]
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
def test_a_wait_that_ends_and_one_that_does_not(job: HangingJob) -> None:
    """Code that holds the interpreter lock, and a rank that never comes to a barrier in validation."""
    (locked,) = job.reports()
    assert "  Rank 1 never came to all_reduce #3 of group data.\n" in locked, locked
    assert re.search(r"^  1 .* -  .*does not answer: .*lock$", locked, re.MULTILINE), locked
    (job.directory / "interpreter lock").touch()
    hanging = job.reports(2)[1]
    assert re.search(r"Rank 1 never came to barrier #\d+ of group world\.", hanging), hanging
    where = r"launch/hang_script.py:\d+ in validation_step"
    assert re.search(r"^  1 .* -  .*tests/faults.py:\d+ in hang$", hanging, re.MULTILINE), hanging
    assert re.search(rf"^  0 .*barrier #\d+ of group world for \d+ s  {where}$", hanging, re.MULTILINE), hanging
    assert job.text.count(END) == 1
    last = job.ends_when_rank_1_is_killed()
    assert re.search(r"Meanwhile rank 0 waited in barrier #\d+ of group world for \d+\.\d s", last), last
    assert re.search(r"rank 1 \(host \S+, pid \d+, .*was ended by SIGKILL", last), last


@pytest.mark.parametrize(
    ("job", "call"),
    [
        (("spawn", "own"), "all_reduce"),  # of the user's code: nothing passes the meter on that rank, its stack tells
        (("external", "different"), r"barrier #\d+ of group world"),
    ],
    indirect=["job"],
)
def test_two_ranks_in_different_collectives(job: HangingJob, call: str) -> None:
    """They waited until the timeout of 30 minutes, although neither could go on."""
    report = job.reports()[0]
    verdict = (
        rf"anks have called different collectives, and cannot go on: rank 0 {call} "
        r"\(launch/hang_script.py:\d+ in wait\), rank 1 all_reduce #3 of group data \("
    )
    assert re.search(verdict, report), report
    assert "The run ends." in report
    assert re.search(verdict, job.ends_by_itself())
