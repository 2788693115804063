"""The example's job for Kubernetes: its own command, with the variables that the cluster sets, trains.

Two nodes stand on one machine, each with one rank. SLURM's job runs under a real SLURM, in ``test_slurm.py``.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from tests.launch.job import Job
from tests.world import free_port

pytestmark = pytest.mark.launch

ROOT = Path(__file__).resolve().parents[2]
FEW = ["--trainer.max_steps=3", "--trainer.limit_val_batches=1", "--trainer.devices=1"]


def test_train_job_trains_in_two_pods(tmp_path: Path) -> None:
    """torchrun takes nodes, rank and address from the variables of Kubeflow Trainer."""
    runtime, job = yaml.safe_load_all((ROOT / "examples/trainjob.yaml").read_text())
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == 2
    *shell, line = job["spec"]["trainer"]["command"]
    assert shell == ["sh", "-c"]
    exec_, torchrun, nproc, *options = shlex.split(line)
    assert (exec_, torchrun, nproc) == ("exec", "torchrun", "--nproc-per-node=2")
    options = ["--nproc-per-node=1", *(str(ROOT / word) if word.startswith("configs/") else word for word in options)]
    address = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "torch.distributed.run", *options, *FEW]
    with Job(tmp_path / "logs") as ranks:
        for rank in range(2):
            ranks.start(None, command, {**address, "PET_NODE_RANK": str(rank)}, cwd=tmp_path)
        ranks.wait()
    world = json.loads((tmp_path / "runs/ring_ddp/version_0/multigpu_report.json").read_text())["world"]
    assert (world["size"], world["nodes"]) == (2, 2)
