"""A rank that fails ends the whole job, with its own exception as the last word and nothing left running."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.launch import failing_script, fault_script, job
from tests.world import free_port

pytestmark = pytest.mark.launch


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return job.run(str(tmp_path), "-m", failing_script.__name__, *arguments, SAVE_TO=str(tmp_path))


def test_a_program_that_goes_on_after_a_failure_learns_that_ranks_have_ended(tmp_path: Path) -> None:
    """It would wait for them until join_timeout_s is over."""
    finished = run(tmp_path, "ring_ddp", "2", "0", "again")
    assert finished.returncode == 1
    last = finished.stderr.strip().splitlines()[-1]
    assert re.match(r"The job failed: rank 1 \(host \S+, pid \d+, no step completed\) ended with exit status 1", last)


@pytest.mark.parametrize(("strategy", "devices", "rank"), [("ring_ddp", "3", "0"), ("ring_ddp_spawn", "2", "1")])
def test_the_exception_of_any_rank_is_what_the_user_sees(
    strategy: str, devices: str, rank: str, tmp_path: Path
) -> None:
    finished = run(tmp_path, strategy, devices, rank, "raise")
    assert finished.returncode == 1
    lines = finished.stderr.strip().splitlines()
    (index,) = [number for number, line in enumerate(lines) if line.startswith("The job failed")]
    last, advice = lines[index:][:2]
    # Where ranks are spawned, the first process calls its callbacks, which warn, when all of them have ended.
    assert len(lines) == index + 2 or strategy == "ring_ddp_spawn"
    assert re.fullmatch(
        rf"The job failed: rank {rank} \(host \S+, pid \d+, last completed step 3, at launch/failing_script.py:\d+ in "
        rf"training_step\) raised OwnError: the data on rank {rank} is spoilt", last,
    ), finished.stderr[-3000:]  # fmt: skip
    assert re.fullmatch(r"Resume with ckpt_path='.*/checkpoints/.*step=3\.ckpt'", advice)
    # 249 lines, of which each rank printed its own: one rank's traceback without Lightning's frames, and one line.
    failure = lines[[line.startswith("Traceback") for line in lines].index(True) : index + 2]
    assert finished.stderr.count("Traceback") == 1
    assert sum("site-packages" in line for line in failure) == 0, failure
    assert failure.count(advice) == 1
    assert len(failure) <= 20, failure  # eight of them because of the forked interpreter
    assert "onnection closed" not in finished.stderr, "what follows from the failure must not hide it"
    if strategy == "ring_ddp":  # where ranks are spawned, callbacks see exceptions in the first process only
        assert torch.load(tmp_path / "on_exception.ckpt", weights_only=True)["global_step"] == 3
    else:
        assert "saw 0 RankFailedError" in finished.stdout, "as from Lightning's own launchers that spawn"


@pytest.mark.parametrize(("rank", "how"), [("-1", "again"), ("1", "survive")])
def test_a_program_whose_ranks_all_catch_a_failure_goes_on(rank: str, how: str, tmp_path: Path) -> None:
    """Pruned trials, which all ranks raise: the second rank ended, and the program's next fit was refused.

    After the failure of one rank the first one waited for the others to end, and killed them.
    """
    finished = run(tmp_path, "ring_ddp", "2", rank, how)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.count("caught") == 2
    assert finished.stderr.count("The job failed") == 1, "when all ranks have left the run, caught or not"


def test_a_rank_of_torchrun_is_killed_before_it_joins(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), "-m"]
    fault = [fault_script.__name__, "popen", "kill", "joining", "1", "0", "0"]
    finished = job.run(str(tmp_path), *torchrun, *fault, SAVE_TO=str(tmp_path))
    assert finished.returncode == 1
    assert re.search(r"rank 1 \(host .* was ended by SIGKILL", finished.stderr), finished.stderr[-3000:]
