"""A rank that can be lost ends, and the launchers go on with the others."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.launch import job, lost_script

pytestmark = pytest.mark.launch

GOES_ON = r"The job goes on without a rank: rank 1 \(host \S+, pid \d+, last completed step [34][^)]*\) "


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return job.run(str(tmp_path), "-m", lost_script.__name__, *arguments, TMPDIR=str(tmp_path))


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


def test_a_second_run_of_the_same_program_names_the_rank_that_was_lost(tmp_path: Path) -> None:
    finished = run(tmp_path, "popen", "kill", "again")
    assert finished.returncode == 1
    *lines, last = finished.stderr.strip().splitlines()
    assert any(re.match(f"{GOES_ON}was ended by SIGKILL", line) for line in lines), finished.stderr[-3000:]
    assert re.search(
        r"rank 1 \(pid \d+\), which an earlier run of this program has started, was ended by SIGKILL", last
    )
