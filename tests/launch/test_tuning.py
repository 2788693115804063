"""A script that tunes before it trains: its processes live on when the Tuner ends its fit."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.launch import job, tuning_script

pytestmark = pytest.mark.launch


def run(strategy: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return job.run(str(directory), "-m", tuning_script.__name__, strategy, cwd=directory)


def test_all_ranks_train_with_what_was_found(tmp_path: Path) -> None:
    finished = run("ring_ddp", tmp_path)
    assert finished.returncode == 0, finished.stderr[-3000:]
    found = dict(re.findall(r"rank (\d): 21 steps at (\S+)", finished.stdout))
    assert set(found) == {"0", "1"}, finished.stdout + finished.stderr
    assert float(found["0"]) != 0.01, "the rate that the module began with"
    assert not list(tmp_path.iterdir()), "no checkpoint, no word of a failure"


def test_spawned_ranks_cannot_be_tuned(tmp_path: Path) -> None:
    finished = run("ring_ddp_spawn", tmp_path)
    assert finished.returncode == 1
    assert finished.stderr.strip().splitlines()[-1].startswith("ValueError: a Tuner changes the module of the process")
