"""A rank that fails ends the whole job, with its own exception as the last word and nothing left running."""

from __future__ import annotations

import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.launch import failing_script, job
from tests.world import free_port

pytestmark = pytest.mark.launch


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the script as a user does."""
    return job.run(str(tmp_path), "-m", failing_script.__name__, *arguments, SAVE_TO=str(tmp_path))


def test_a_program_that_goes_on_after_a_failure_learns_that_ranks_have_ended(tmp_path: Path) -> None:
    """It would wait for them until join_timeout_s is over."""
    finished = run(tmp_path, "ring_ddp", "2", "0", "again")
    assert finished.returncode == 1
    last = finished.stderr.strip().splitlines()[-1]
    assert re.match(r"The job failed: rank 1 \(host \S+, pid \d+, no step completed\) ended with exit status 1", last)


@pytest.mark.parametrize(
    ("strategy", "devices", "rank"), [("ring_ddp", "2", "1"), ("ring_ddp", "3", "0"), ("ring_ddp_spawn", "2", "1")]
)
def test_the_exception_of_any_rank_is_what_the_user_sees(
    strategy: str, devices: str, rank: str, tmp_path: Path
) -> None:
    finished = run(tmp_path, strategy, devices, rank, "raise")
    assert finished.returncode == 1
    *_, last, advice = finished.stderr.strip().splitlines()
    assert re.fullmatch(
        rf"The job failed: rank {rank} \(host \S+, pid \d+, last completed step 3, at launch/failing_script.py:\d+ in "
        rf"training_step\) raised OwnError: the data on rank {rank} is spoilt", last,
    ), finished.stderr[-3000:]  # fmt: skip
    assert re.fullmatch(r"Resume with ckpt_path='.*/checkpoints/.*step=3\.ckpt'", advice)
    # 249 lines, of which each rank printed its own: one rank's traceback without Lightning's frames, and one line.
    failure = finished.stderr[finished.stderr.index("Traceback") :].splitlines()
    assert sum(line.startswith("Traceback") for line in failure) == 1
    assert sum("site-packages" in line for line in failure) == 0, failure
    assert failure.count(advice) == 1
    assert len(failure) <= 20, failure  # eight of them because of the forked interpreter
    assert finished.stderr.count("The job failed") == 1
    assert "onnection closed" not in finished.stderr, "what follows from the failure must not hide it"
    if strategy == "ring_ddp":  # where ranks are spawned, callbacks see exceptions in the first process only
        assert torch.load(tmp_path / "on_exception.ckpt", weights_only=True)["global_step"] == 3
    else:
        assert "rank 0 saw OwnError" in finished.stdout, "as from Lightning's own launchers that spawn"


@pytest.mark.parametrize(
    ("strategy", "rank", "how"),
    [("ring_ddp", "-1", "again"), ("ring_ddp_spawn", "-1", "again"), ("ring_ddp", "1", "survive")],
)
def test_a_program_whose_ranks_all_catch_a_failure_goes_on(strategy: str, rank: str, how: str, tmp_path: Path) -> None:
    """Pruned trials, which all ranks raise: the second rank ended, and the program's next fit was refused.

    After the failure of one rank the first one waited for the others to end, and killed them.
    """
    finished = run(tmp_path, strategy, "2", rank, how)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.count("caught\n") == (2 if strategy == "ring_ddp" else 1)
    assert "The job failed" not in finished.stderr


def test_an_exception_that_all_ranks_raise_is_shown_once(tmp_path: Path) -> None:
    finished = run(tmp_path, "ring_ddp", "2", "-1", "raise")
    assert finished.returncode == 1
    assert sum(line.startswith("Traceback") for line in finished.stderr.splitlines()) == 1, finished.stderr[-3000:]
    for rank in range(2):
        assert finished.stderr.count(f"OwnError: the data on rank {rank} is spoilt\n") == 1


BETWEEN = """
import os, signal
import lightning_multigpu
from tests.strategies.tasks import Case, Classifier, make_trainer, train_loader
trainer = make_trainer(Case(), "ring_ddp", 2, default_root_dir=os.environ["SAVE_TO"])
module, loader = Classifier(), train_loader(Case(), trainer)
trainer.fit(module, loader)
if trainer.global_rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
trainer.predict(module, loader)
"""


def test_a_rank_that_is_killed_between_two_runs_is_named(tmp_path: Path) -> None:
    """Guardians ended with each run: the next one failed by an error of the back end, after SIGSTOP in 30 minutes."""
    (script := tmp_path / "script.py").write_text(BETWEEN)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SAVE_TO": str(tmp_path)}
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(job.run, f"{tmp_path}-{k}", str(script), LOCAL_RANK=str(k), **place) for k in range(2)]
    first = runs[0].result()
    assert runs[1].result().returncode == -signal.SIGKILL
    assert first.returncode not in (0, None)
    assert re.search(r"rank 1 .* was ended by SIGKILL", first.stderr)


@pytest.mark.parametrize("strategy", ["sharded_ps", "async_ps"])
def test_a_server_that_is_stopped_ends_the_job(strategy: str, tmp_path: Path) -> None:
    """All ranks waited for it without a word."""
    finished = run(tmp_path, strategy, "2", "0", "stop server")
    assert finished.returncode not in (0, None)
    last = finished.stderr.strip().splitlines()[-1]
    assert re.search(r"rank 0 .* waits for its parameter server \(pid \d+\), which a signal has stopped", last)
