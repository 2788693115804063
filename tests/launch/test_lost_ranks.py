"""A rank that can be lost ends, and the launchers go on with the others."""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.launch import job, lost_script
from tests.world import free_port

pytestmark = pytest.mark.launch

GOES_ON = r"The job goes on without a rank: rank 1 \(host \S+, pid \d+, last completed step [34][^)]*\) "


def run(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    mark = f"{tmp_path}-{variables.get('LOCAL_RANK')}"
    return job.run(mark, "-m", lost_script.__name__, *arguments, TMPDIR=str(tmp_path), timeout_s=90, **variables)


@pytest.mark.parametrize(
    ("start_method", "how", "what"),
    [
        ("popen", "raise", "raised ValueError"),
        ("popen", "terminate", "was terminated (SIGTERM)"),
        ("spawn", "exit", "ended with exit status 7"),
    ],
)
def test_the_others_finish(start_method: str, how: str, what: str, tmp_path: Path) -> None:
    finished = run(tmp_path, start_method, how, "once")
    assert finished.returncode == 0, finished.stderr[-3000:]
    lines = [line for line in finished.stderr.splitlines() if re.match(GOES_ON + re.escape(what), line)]
    assert len(lines) == 1, finished.stderr[-3000:]
    assert finished.stderr.count("ValueError: the data is spoilt\n") == (2 if how == "raise" else 0), (
        "and its traceback"
    )
    assert "worker 1 is gone, and training goes on; workers left: 2" in finished.stderr
    assert "The job failed" not in finished.stderr
    assert "Resume with" not in finished.stderr
    ranks = "02" if start_method == "popen" else "0"  # spawned ranks give the result to the first process
    said = re.findall(r"rank \d has trained: (?:True|False)", finished.stdout)  # their lines may run into each other
    assert sorted(said) == [f"rank {rank} has trained: True" for rank in ranks]


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_second_run_of_the_same_program_names_the_rank_that_was_lost(by_hand: bool, tmp_path: Path) -> None:
    """Where ranks had been started by hand, the second run waited for ``join_timeout_s`` (600 s)."""
    places: list[dict[str, str]] = [{}]
    if by_hand:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        places = [{**place, "LOCAL_RANK": str(rank)} for rank in range(lost_script.RANKS)]
    with ThreadPoolExecutor(len(places)) as pool:
        finished = list(pool.map(lambda place: run(tmp_path, "popen", "kill", "again", **place), places))
    assert [each.returncode for each in finished] == ([1, -9, 1] if by_hand else [1])
    errors = "".join(each.stderr for each in finished)
    for start in (GOES_ON, r"The job failed: rank 1 \(host \S+, pid \d+, .*\) "):
        assert re.search(f"^{start}was ended by SIGKILL", errors, re.MULTILINE), errors[-3000:]
