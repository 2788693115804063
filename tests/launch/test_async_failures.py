"""An asynchronous job loses a rank that was started by hand, or its server, and what both leave behind is right."""

from __future__ import annotations

import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import async_script, job
from tests.launch.async_script import LOST, RANKS
from tests.strategies.parameter_server.test_asynchronous_training import (
    BATCH,
    EPOCHS,
    EVERY,
    NUM_BATCHES,
    goes_on,
    trained_on,
)
from tests.world import World, free_port

pytestmark = pytest.mark.launch


def written(directory: Path) -> dict[int, Counter[float]]:
    """How often each sample of each epoch came into the weights, by what ranks have written."""
    lines = [line for file in directory.glob("samples-*") for line in file.read_text().splitlines()]
    return trained_on([{"samples": json.loads(line)} for line in lines])


def test_a_rank_that_was_started_by_hand_is_killed_while_it_pushes(tmp_path: Path) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TMPDIR": str(tmp_path)}

    def run(rank: int) -> Any:
        command = ["-m", async_script.__name__, str(tmp_path), "rank"]
        return job.run(f"{tmp_path}-{rank}", *command, LOCAL_RANK=str(rank), **place)

    with ThreadPoolExecutor(RANKS) as pool:
        finished = list(pool.map(run, range(RANKS)))
    errors = "\n".join(process.stderr for process in finished)
    assert [process.returncode for process in finished] == [0, -9, 0], errors[-4000:]
    rank = r"rank 1 \(host \S+, pid \d+, last completed step 2[^)]*\)"
    assert len(re.findall(f"goes on without a rank: {rank} was ended by SIGKILL", errors)) == 1, errors[-4000:]
    assert errors.count("worker 1 is gone, and training goes on; workers left: 2; its 1 batches go to others") == 1
    assert "The job failed" not in errors
    assert written(tmp_path) == dict.fromkeys(range(EPOCHS), EVERY), "its unfinished batch went to another rank"
    assert len((tmp_path / f"samples-{LOST}").read_text().splitlines()) == 2
    assert "rank 0 ends at the rate 0.000000" in finished[0].stdout, "the schedule has its steps, and no more"


def test_a_killed_server_ends_the_job_which_goes_on_from_its_last_checkpoint(tmp_path: Path, world2: World) -> None:
    finished = job.run(str(tmp_path), "-m", async_script.__name__, str(tmp_path), "server", TMPDIR=str(tmp_path))
    assert finished.returncode == 1, finished.stderr[-4000:]
    last, advice = finished.stderr.strip().splitlines()[-2:]
    assert re.search(r"parameter server 0 of 1 \(127.0.0.1\) has ended", last)
    assert advice.endswith("last.ckpt'")
    path = tmp_path / "last.ckpt"
    saved = torch.load(path, weights_only=False)
    first = saved["parameter_server"]["first_batch"]
    assert saved["epoch"] == 1
    assert 0 < first < NUM_BATCHES
    results = world2.run(goes_on, str(path), EPOCHS)
    found = trained_on(results)
    assert max(found[1].values()) == 1
    assert found[1].total() == EVERY.total() - first * BATCH, "those that are left of the epoch"
    assert found[2] == EVERY
    assert found.keys() == {1, 2}
    updates = -(-found[1].total() // BATCH) + NUM_BATCHES
    assert sum(result["steps"] for result in results) - 2 * saved["global_step"] == updates
