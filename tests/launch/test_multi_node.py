"""Two hosts, started in the three ways that users have, train as one device does at the same global batch."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_multigpu.emulation import EmulatedHosts, Host
from tests.launch import train_script
from tests.launch.job import Job

pytestmark = [pytest.mark.hosts, pytest.mark.launch]

SCRIPT = train_script.__file__


def slurm_environment(host: Host, hosts: EmulatedHosts) -> dict[str, str]:
    """What srun sets for the one task on ``host``; the address of the first node is Lightning's to find."""
    nodes = f"host[0-{len(hosts) - 1}]"
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_NODELIST": nodes,
        "SLURM_NNODES": str(len(hosts)),
        "SLURM_NTASKS": str(len(hosts)),
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NODEID": str(host.node_rank),
        "SLURM_PROCID": str(host.node_rank),
        "SLURM_LOCALID": "0",
    }


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return train_script.train(tmp_path_factory.mktemp("one-device"))


def assert_same_weights(root: Path, expected: dict[str, Tensor]) -> None:
    """The weights that all ranks saved: bit for bit the same, and those of one device up to rounding."""
    first, *others = (torch.load(path) for path in sorted(root.glob("weights-*.pt")))
    assert others
    for name, value in expected.items():
        for other in others:
            assert torch.equal(first[name], other[name]), f"{name} differs between ranks"
        torch.testing.assert_close(first[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("launcher", "mesh"), [("python", ()), ("python", (2, 2, 2)), ("torchrun", (1, 2, 2))], ids=str
)
def test_two_hosts_train_as_one_device(
    launcher: str, mesh: tuple[int, ...], hosts: EmulatedHosts, tmp_path: Path, one_device: dict[str, Tensor]
) -> None:
    """Gradients, or activations, travel between the hosts, and sums within layers inside of them."""
    ranks = max(2, math.prod(mesh))
    arguments = [SCRIPT, str(tmp_path), "--devices", str(ranks // 2)]
    arguments += ["--mesh", *map(str, mesh)] if mesh else []
    before = [host.counters() for host in hosts]
    with Job(tmp_path / "logs") as job:
        for host in hosts:
            torchrun = [
                *("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks // 2)),
                *("--node-rank", str(host.node_rank), "--master-addr", host.master_address, "--master-port", "29600"),
            ]
            if launcher == "torchrun":
                job.start(host, [sys.executable, *torchrun, *arguments], {})
            else:
                job.start(host, [sys.executable, *arguments], host.environment())
        job.wait()
        for rank in range(ranks):
            assert f"finished as rank {rank} of {ranks}" in job.output(rank * 2 // ranks)
    assert_same_weights(tmp_path, one_device)
    for host, earlier in zip(hosts, before, strict=True):
        assert host.counters().sent_bytes > earlier.sent_bytes


def last_step(output: str) -> int:
    steps = re.findall(r"^step (\d+)$", output, re.MULTILINE)
    return int(steps[-1]) if steps else 0


def fake_scontrol(directory: Path) -> Path:
    """A program that records what it is called with; returns the record."""
    record = directory / "scontrol-calls"
    program = directory / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nls "$SLURM_TEST_ROOT"/hpc_ckpt_*.ckpt >> {record}\necho "$@" >> {record}\n')
    program.chmod(0o755)
    return record


def test_requeued_by_slurm_it_saves_first_and_goes_on_where_it_was(hosts: EmulatedHosts, tmp_path: Path) -> None:
    """SLURM signals every rank on its own: one may be a step ahead of the other, and saving needs both."""
    max_steps = 16
    expected = train_script.train(tmp_path / "one-device", max_steps=max_steps)
    record = fake_scontrol(tmp_path)
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])

    def start(job: Job, pause_s: float) -> None:
        for host in hosts:
            command = [sys.executable, SCRIPT, str(tmp_path), "--max-steps", str(max_steps), "--pause-s", str(pause_s)]
            environment = {**slurm_environment(host, hosts), "PATH": path, "SLURM_TEST_ROOT": str(tmp_path)}
            job.start(host, command, environment)

    with Job(tmp_path / "first-run") as job:
        start(job, pause_s=0.25)
        job.wait_until(lambda: last_step(job.output(0)) >= 3, "the third step")
        job.processes[0].send_signal(signal.SIGUSR1)
        time.sleep(0.4)  # longer than a step
        job.processes[1].send_signal(signal.SIGUSR1)
        job.wait_until(record.exists, "the call of scontrol")
        job.wait_until(lambda: "requeue" in record.read_text(), "the request to requeue")
        # From here on SLURM ends the processes, wherever they are.
        interrupted_at = last_step(job.output(0))
    assert interrupted_at < max_steps
    saved, call = record.read_text().splitlines()[:2]
    assert Path(saved) == tmp_path / "hpc_ckpt_1.ckpt"
    assert call == "requeue 4711"
    saved_at = torch.load(saved, weights_only=False)["global_step"]
    assert 3 <= saved_at <= interrupted_at + 1

    with Job(tmp_path / "second-run") as job:
        start(job, pause_s=0.0)
        job.wait()
        first_step = re.search(r"^step (\d+)$", job.output(0), re.MULTILINE)
        assert first_step is not None
        assert int(first_step[1]) == saved_at + 1
    assert_same_weights(tmp_path, expected)
