"""A real SLURM runs ``examples/slurm.sbatch``: a signal with requeue and resume, a killed task, ``scancel``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from tests.launch.job import assert_none_left, marked
from tests.launch.slurm import Slurm, slurm
from tests.world import free_port

pytestmark = pytest.mark.launch

ROOT = Path(__file__).resolve().parents[2]


def checkout(folder: Path) -> Path:
    """A folder in which the job script runs as in a checkout; its training does not end by itself."""
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").write_text(f"PATH={Path(sys.executable).parent}:$PATH\n")
    (folder / "configs").mkdir()
    config = yaml.safe_load((ROOT / "configs/ring_ddp.yaml").read_text())
    config["trainer"] |= {"max_epochs": -1, "enable_progress_bar": False}
    (folder / "configs/ring_ddp.yaml").write_text(yaml.safe_dump(config))
    return folder


class BatchJob:
    def __init__(self, cluster: Slurm, folder: Path, nodes: int) -> None:
        self.cluster, self.folder = cluster, checkout(folder)
        options = ["--parsable", f"--nodes={nodes}", f"--ntasks-per-node={2 // nodes}", "--cpus-per-task=1"]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        path = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        command = ["sbatch", *options, str(ROOT / "examples/slurm.sbatch")]
        self.number = cluster.run(*command, cwd=self.folder, **address, **path).strip()
        assert self.number.isdigit(), self.number
        self.log = self.folder / f"slurm-{self.number}.out"

    @property
    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_until_trains(self, version: int) -> None:
        last = self.folder / f"runs/ring_ddp/version_{version}/checkpoints/last.ckpt"
        self.cluster.wait_until(last.exists, f"the first epoch of version {version}", self.log)

    def wait_for_state(self, *states: str) -> None:
        self.cluster.wait_until(lambda: self.cluster.state(self.number) in states, f"{states}", self.log)


def test_a_batch_job(tmp_path: Path) -> None:
    """Nothing but a real SLURM shows that its signals, requeues and ends are what the strategies take them for."""
    (tmp_path / "slurm").mkdir()
    with slurm(tmp_path / "slurm") as cluster:
        job = BatchJob(cluster, tmp_path / "two_nodes", nodes=2)
        job.wait_until_trains(0)
        cluster.run("scancel", "--signal=USR1", job.number)
        job.wait_for_state("PENDING")
        cluster.run("scontrol", "update", f"JobId={job.number}", "StartTime=now")
        job.wait_until_trains(1)
        assert "Restored all states from the checkpoint" in job.output

        [second] = [p for p in marked(str(cluster.folder)) if is_rank(p, 1)]
        second.kill()
        job.wait_for_state("FAILED")
        assert "rank 1" in job.output
        assert "SIGKILL" in job.output

        job = BatchJob(cluster, tmp_path / "one_node", nodes=1)
        job.wait_until_trains(0)
        cluster.run("scancel", job.number)
        job.wait_for_state("CANCELLED")
        cluster.wait_until(lambda: not any(map(is_rank, marked(str(cluster.folder)))), "the end of the ranks", job.log)
        assert "SIGTERM" in job.output
    assert_none_left(str(tmp_path / "slurm"), job.output)


def is_rank(process: psutil.Process, rank: int | None = None) -> bool:
    """Whether it is a task of SLURM that trains."""
    number = process.environ().get("SLURM_PROCID")
    return number is not None and rank in (None, int(number)) and "lightning-multigpu" in " ".join(process.cmdline())
