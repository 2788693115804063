"""Ctrl-C and other signals to a job as a whole, and to one of its ranks only.

That of one rank in training is in ``test_fault_matrix.py``.
"""

from __future__ import annotations

import os
import pty
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.launch import interrupted_script
from tests.launch.job import Job, assert_none_left

pytestmark = pytest.mark.launch

DEADLINE_S = 180.0
CTRL_C = b"\x03"


class Interrupted(Job):
    """The script, as the leader of a process group and the owner of a terminal."""

    def __init__(self, method: str, phase: str, place: Path) -> None:
        super().__init__(place)
        self.terminal, end = pty.openpty()
        command = [sys.executable, "-m", interrupted_script.__name__, method, phase]
        terminal = {"stdin": end, "start_new_session": True, "own_terminal": True}
        self.start(None, command, {"SAVE_TO": str(place)}, **terminal)
        os.close(end)
        (self.process,) = self.processes

    def ready(self) -> dict[int, int]:
        return {int(rank): int(pid) for rank, pid in self.lines(r"ready (\d) (\d+)", 2)}

    def lines(self, pattern: str, number: int) -> list[tuple[str, ...]]:
        deadline = time.monotonic() + DEADLINE_S
        while len(found := set(re.findall(f"^{pattern}$", self.output(0), re.MULTILINE))) < number:
            assert time.monotonic() < deadline, self.output(0)
            time.sleep(0.05)
        return sorted(found)

    def end(self) -> int:
        """Waits until everything has ended; the exit status of what the user has started."""
        status = self.process.wait(DEADLINE_S)
        assert_none_left(str(self.directory), self.output(0))
        return int(status)

    def saved(self) -> int:
        """Steps that the weights in the checkpoint have seen, which is whole."""
        return int(torch.load(self.directory / "on_exception.ckpt", weights_only=True)["global_step"])


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Interrupted]:
    with Interrupted(*request.param, tmp_path) as started:
        yield started
    os.close(started.terminal)


def seen(job: Interrupted, kind: str) -> set[int]:
    """Steps at which both ranks have learnt of their end."""
    ranks = job.lines(rf"saw (\d) {kind} (\d+)", 2)
    assert {rank for rank, _ in ranks} == {"0", "1"}
    return {int(step) for _, step in ranks}


@pytest.mark.parametrize("job", [("popen", "workers")], indirect=True)
def test_ctrl_c_in_a_terminal_ends_all_ranks_at_the_same_batch(job: Interrupted) -> None:
    """The workers of the loaders get it too; they must go on until the ranks have agreed."""
    job.ready()
    os.write(job.terminal, CTRL_C)
    assert job.end() == 1
    (step,) = seen(job, "KeyboardInterrupt")
    assert job.saved() == step > 2
    output = job.output(0)
    assert output.count("Another Ctrl-C ends it at once.") == 1
    assert "Error" not in output
    # Right after an epoch kept.ckpt has this step already, and the other file of the same step is newer.
    kept = r"ring_ddp: 2 ranks on 1 node.*written to .*Resume with ckpt_path='.*(kept|on_exception).ckpt'"
    assert re.search(kept, output, re.DOTALL)
    assert output.count("Resume with") == 1


@pytest.mark.parametrize("job", [("popen", "validation")], indirect=True)
def test_one_rank_alone_is_interrupted_in_a_long_validation(job: Interrupted) -> None:
    """No batch of training comes, so that it acts alone after a while, and the others follow."""
    os.kill(job.ready()[1], signal.SIGINT)
    assert job.end() == 1
    assert seen(job, "KeyboardInterrupt") == {6}
    assert job.saved() == 6


@pytest.mark.parametrize(("job", "rank"), [(("spawn", "training"), None), (("fork", "training"), 1)], indirect=["job"])
def test_spawned_ranks_save_what_they_have_trained(job: Interrupted, rank: int | None) -> None:
    """The first process has untrained weights, and Lightning calls its callbacks as well.

    A SIGINT to one rank ended with "The job failed: rank 0 ended with exit status 1" as the last line.
    """
    ranks = job.ready()
    if rank is None:
        os.killpg(job.process.pid, signal.SIGINT)
    else:
        os.kill(ranks[rank], signal.SIGINT)
    assert job.end() == 1
    steps = seen(job, "KeyboardInterrupt")
    assert job.saved() == max(steps) > 2
    assert "The job failed" not in job.output(0)


@pytest.mark.parametrize("job", [("spawn", "hang")], indirect=True)
def test_a_second_ctrl_c_ends_all_at_once(job: Interrupted) -> None:
    """Where ranks wait in a collective and learn of nothing."""
    job.ready()
    os.write(job.terminal, CTRL_C)
    job.lines("(Ctrl-C: .*)", 1)
    time.sleep(1.0)
    assert job.process.poll() is None
    os.write(job.terminal, CTRL_C)
    assert job.end() == 130
    assert not re.search("Aborted|SIGKILL", job.output(0))


@pytest.mark.parametrize("job", [("popen", "sanity")], indirect=True)
def test_sigterm_outside_training_lets_callbacks_save(job: Interrupted) -> None:
    """Lightning's handler broadcasts, wherever each rank is."""
    for pid in job.ready().values():
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.2)
    job.end()
    assert seen(job, "SIGTERMException") == {job.saved()}


@pytest.mark.parametrize("job", [("popen", "hang")], indirect=True)
@pytest.mark.parametrize("times", [1, 2])
def test_sigterm_ends_ranks_that_wait_for_each_other(job: Interrupted, times: int) -> None:
    """Python's handlers run in the main thread, which waited in C code: only SIGKILL ended such a job."""
    first, second = job.ready().values()
    for pid in (second, *[first] * times):  # the first rank, whose status is the job's, learns of the other's end
        os.kill(pid, signal.SIGTERM)
        time.sleep(times / 2)
    assert job.end() == 143
    assert ("a second SIGTERM has ended the job at once" in job.output(0)) == (times == 2)
    alone = "The job failed: the ranks have agreed on no batch within 4 s after SIGTERM"
    assert (alone in job.output(0)) == (times == 1)
    assert "SIGKILL" not in job.output(0)
