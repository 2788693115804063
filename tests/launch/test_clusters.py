"""The example's job for Kubernetes: its own command, with the variables that the cluster sets, trains.

Two nodes stand on one machine, each with one rank. torchrun is replaced by a program that notes how it was called; each
task is then started with that. SLURM's job runs under a real SLURM, in ``test_slurm.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.launch.job import Job
from tests.world import free_port

pytestmark = pytest.mark.launch

ROOT = Path(__file__).resolve().parents[2]
FEW = ["--trainer.max_steps=3", "--trainer.limit_val_batches=1", "--trainer.devices=1"]


def called_with(directory: Path, command: list[str]) -> list[str]:
    """The arguments with which a shell command calls torchrun."""
    stub = directory / "bin" / "torchrun"
    stub.parent.mkdir()
    stub.write_text(f'#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], open("{directory}/call", "w"))\n')
    stub.chmod(0o755)
    environment = {**os.environ, "PATH": os.pathsep.join([str(stub.parent), os.environ["PATH"]])}
    subprocess.run(command, env=environment, cwd=directory, check=True, timeout=30)
    arguments: list[str] = json.loads((directory / "call").read_text())
    return [str(ROOT / word) if word.startswith("configs/") else word for word in arguments]


def test_train_job_trains_in_two_pods(tmp_path: Path) -> None:
    """torchrun takes nodes, rank and address from the variables of Kubeflow Trainer."""
    runtime, job = yaml.safe_load_all((ROOT / "examples/trainjob.yaml").read_text())
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == 2
    options = called_with(tmp_path, job["spec"]["trainer"]["command"])
    options = ["--nproc-per-node=1" if option.startswith("--nproc") else option for option in options]
    address = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "torch.distributed.run", *options, *FEW]
    with Job(tmp_path / "logs") as ranks:
        for rank in range(2):
            ranks.start(None, command, {**address, "PET_NODE_RANK": str(rank)}, cwd=tmp_path)
        ranks.wait()
    world = json.loads((tmp_path / "runs/ring_ddp/version_0/multigpu_report.json").read_text())["world"]
    assert (world["size"], world["nodes"]) == (2, 2)
