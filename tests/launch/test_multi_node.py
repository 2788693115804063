"""Two hosts, started by hand and by torchrun, train as one device does at the same global batch."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_multigpu.emulation import EmulatedHosts
from tests.launch import train_script
from tests.launch.job import Job
from tests.strategies.tasks import assert_same_weights

pytestmark = [pytest.mark.hosts, pytest.mark.launch]

SCRIPT = train_script.__file__


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return train_script.train(tmp_path_factory.mktemp("one-device"))


@pytest.mark.parametrize(("launcher", "mesh"), [("torchrun", ()), ("python", (1, 2, 2))], ids=str)
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
                *("--node-rank", str(host.node_rank), "--master-addr", hosts[0].address, "--master-port", "29600"),
            ]
            if launcher == "torchrun":
                job.start(host, [sys.executable, *torchrun, *arguments], {})
            else:
                job.start(host, [sys.executable, *arguments], host.environment())
        job.wait()
        for rank in range(ranks):
            assert f"finished as rank {rank} of {ranks}" in job.output(rank * 2 // ranks)
    first, *others = (torch.load(path) for path in sorted(tmp_path.glob("weights-*.pt")))
    assert len(others) == ranks - 1
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)
    assert_same_weights({"weights": first}, {"weights": one_device})
    for host, earlier in zip(hosts, before, strict=True):
        assert host.counters().sent_bytes > earlier.sent_bytes
