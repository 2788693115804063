"""The examples' jobs for SLURM and Kubernetes: their own commands, with the variables that the cluster sets, train.

Two nodes stand on one machine, each with one rank. Programs of the cluster (srun, torchrun) are replaced by one that
notes how it was called; each task is then started with that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.job import Job
from tests.world import free_port

pytestmark = pytest.mark.launch

ROOT = Path(__file__).resolve().parents[2]
FEW = ["--trainer.max_steps=3", "--trainer.limit_val_batches=1", "--trainer.devices=1"]


def noted_call(directory: Path, program: str, command: list[str], variables: dict[str, str]) -> list[str]:
    """The arguments with which a shell command calls ``program``."""
    stub = directory / "bin" / program
    stub.parent.mkdir()
    stub.write_text(f'#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], open("{directory}/call", "w"))\n')
    stub.chmod(0o755)
    environment = {**os.environ, **variables, "PATH": os.pathsep.join([str(stub.parent), os.environ["PATH"]])}
    subprocess.run(command, env=environment, cwd=directory, check=True, timeout=30)
    arguments: list[str] = json.loads((directory / "call").read_text())
    return [str(ROOT / word) if word.startswith("configs/") else word for word in arguments]


def world_of(directory: Path, nodes: list[tuple[list[str], dict[str, str]]]) -> dict[str, Any]:
    """The world in the report of a run; its nodes are given as Python's arguments and variables."""
    with Job(directory / "logs") as job:
        for arguments, variables in nodes:
            job.start(None, [sys.executable, *arguments], variables, cwd=directory)
        job.wait()
    report = json.loads((directory / "runs/ring_ddp/version_0/multigpu_report.json").read_text())
    world: dict[str, Any] = report["world"]
    return world


def test_slurm_job_trains_on_two_nodes(tmp_path: Path) -> None:
    """``srun`` starts the command once for each task; Lightning's SLURMEnvironment finds the ranks."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    batch = {"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "1"}
    program, *arguments = noted_call(tmp_path, "srun", ["bash", str(ROOT / "examples/slurm.sbatch")], batch)
    assert program == "lightning-multigpu"
    assert arguments[-2:] == ["--trainer.num_nodes=2", "--trainer.devices=1"]
    job = {
        **batch,
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "digits",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_NODELIST": "node[1-2]",
        "SLURM_LOCALID": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = ["-m", "lightning_multigpu", *arguments, *FEW]
    ranks = [(command, {**job, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)}) for rank in range(2)]
    world = world_of(tmp_path, ranks)
    assert (world["size"], world["nodes"]) == (2, 2)


def test_train_job_trains_in_two_pods(tmp_path: Path) -> None:
    """torchrun takes nodes, rank and address from the variables of Kubeflow Trainer."""
    runtime, job = yaml.safe_load_all((ROOT / "examples/trainjob.yaml").read_text())
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == 2
    options = noted_call(tmp_path, "torchrun", job["spec"]["trainer"]["command"], {})
    options = ["--nproc-per-node=1" if option.startswith("--nproc") else option for option in options]
    address = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    command = ["-m", "torch.distributed.run", *options, *FEW]
    world = world_of(tmp_path, [(command, {**address, "PET_NODE_RANK": str(rank)}) for rank in range(2)])
    assert (world["size"], world["nodes"]) == (2, 2)
