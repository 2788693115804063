"""An asynchronous job goes on without a rank, and what that leaves behind is right."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.launch import async_script, job
from tests.launch.async_script import LOST, RANKS
from tests.strategies.parameter_server.test_asynchronous_training import EPOCHS, EVERY, trained_on
from tests.world import free_port

pytestmark = pytest.mark.launch

GOES_ON = r"(?m)^The job goes on without a rank: rank 1 \(host \S+, pid \d+, last completed step [2-4][^)]*\) "


def run(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    variables["TMPDIR"] = str(tmp_path)
    mark = f"{tmp_path}-{variables.get('LOCAL_RANK')}"
    return job.run(mark, "-m", async_script.__name__, str(tmp_path), *arguments, **variables)


def written(directory: Path) -> dict[int, Counter[float]]:
    """How often each sample of each epoch came into the weights, by what ranks have written."""
    lines = [line for file in directory.glob("samples-*") for line in file.read_text().splitlines()]
    return trained_on([{"samples": json.loads(line)} for line in lines])


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_rank_is_killed_while_it_pushes_and_named_in_the_programs_second_run(by_hand: bool, tmp_path: Path) -> None:
    """Where ranks had been started by hand, the second run waited for ``join_timeout_s`` (600 s)."""
    places: list[dict[str, str]] = [{}]
    if by_hand:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        places = [{**place, "LOCAL_RANK": str(rank)} for rank in range(RANKS)]
    with ThreadPoolExecutor(len(places)) as pool:
        finished = list(pool.map(lambda place: run(tmp_path, "popen", "kill", "again", **place), places))
    errors = "".join(process.stderr for process in finished)
    assert [process.returncode for process in finished] == ([1, -9, 1] if by_hand else [1]), errors[-4000:]
    assert len(re.findall(GOES_ON + "was ended by SIGKILL", errors)) == 1, errors[-4000:]
    assert errors.count("worker 1 is gone, and training goes on; workers left: 2; its 1 batches go to others") == 1
    assert re.search(r"^The job failed: rank 1 \(host \S+, pid \d+, .*\) was ended by SIGKILL", errors, re.MULTILINE)
    assert written(tmp_path) == dict.fromkeys(range(EPOCHS), EVERY), "its unfinished batch went to another rank"
    assert len((tmp_path / f"samples-{LOST}").read_text().splitlines()) == 2
    assert "rank 0 ends at the rate 0.000000" in finished[0].stdout, "the schedule has its steps, and no more"


@pytest.mark.parametrize(
    ("start_method", "how", "what"),
    [
        ("popen", "raise", "raised ValueError"),
        ("popen", "terminate", "was interrupted (SIGTERM)"),
        ("spawn", "exit", "ended with exit status 7"),
    ],
)
def test_the_others_finish(start_method: str, how: str, what: str, tmp_path: Path) -> None:
    finished = run(tmp_path, start_method, how)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert len(re.findall(GOES_ON + re.escape(what), finished.stderr)) == 1, finished.stderr[-3000:]
    # With its traceback.
    assert finished.stderr.count("ValueError: the data is spoilt\n") == (2 if how == "raise" else 0)
    assert "worker 1 is gone, and training goes on; workers left: 2" in finished.stderr
    assert "The job failed" not in finished.stderr
    assert "Resume with" not in finished.stderr
    ranks = "02" if start_method == "popen" else "0"  # spawned ranks give the result to the first process
    said = re.findall(r"rank \d has trained: (?:True|False)", finished.stdout)  # their lines may run into each other
    assert sorted(said) == [f"rank {rank} has trained: True" for rank in ranks]
