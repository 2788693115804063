"""A rank that fails before all have come ends the job at once, whoever has started its processes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.launch import failing_script, fault_script, job
from tests.world import free_port

pytestmark = pytest.mark.launch

DEADLINE_S = 180
NOT_OURS = ("torchinductor_", "torchelastic_")  # torch's cache of compiled code, and torchrun's logs


def run(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a job to its end; no temporary file of it may be left."""
    saved, temporary = tmp_path / "saved", tmp_path / "temporary"
    saved.mkdir()
    temporary.mkdir()
    places = {"SAVE_TO": str(saved), "TMPDIR": str(temporary)}
    finished = job.run(str(tmp_path), "-m", *command, timeout_s=DEADLINE_S, **places)
    files = [path.name for path in temporary.iterdir() if not path.name.startswith(NOT_OURS)]
    assert not files, f"left in the temporary directory: {files}"
    return finished


def fault(kind: str, method: str = "popen", where: str = "joining", rank: int = 1) -> list[str]:
    return [fault_script.__name__, method, kind, where, str(rank), "0", "0"]


def test_a_rank_of_torchrun_is_killed(tmp_path: Path) -> None:
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), "-m"]
    finished = run(tmp_path, *torchrun, *fault("kill"))
    assert finished.returncode == 1
    assert "was ended by SIGKILL" in finished.stderr
    assert "rank 1 (host" in finished.stderr


def test_ctrl_c_while_spawned_ranks_join(tmp_path: Path) -> None:
    """torch's spawned process swallows it and ends with status 0, and the others wait for half an hour."""
    finished = run(tmp_path, *fault("interrupt", "spawn"))
    assert finished.returncode == 1
    last = finished.stderr.strip().splitlines()[-1]
    assert "rank 1 (host" in last
    assert "was interrupted (SIGINT)" in last


def test_a_spawned_run_that_ends_well_leaves_no_temporary_file(tmp_path: Path) -> None:
    finished = run(tmp_path, failing_script.__name__, "ring_ddp_spawn", "2", "0", "nothing")
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert re.search(r"report of ring_ddp_spawn in .*multigpu_report.json", finished.stdout), (
        "ranks have taken it along"
    )


def test_sigterm_ends_a_spawned_run_with_143(tmp_path: Path) -> None:
    """Rank 0 then has no result, and Lightning's launcher waits for one for ever."""
    finished = run(tmp_path, *fault("terminate", "spawn", "training"))
    assert finished.returncode == 143, finished.stderr[-3000:]
