"""compression="auto" between two hosts: what a slow link is worth is found by measuring it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from lightning_multigpu.emulation import EmulatedHosts
from tests.hosts import require_hosts
from tests.launch import compression_script
from tests.launch.job import Job

pytestmark = [pytest.mark.hosts, pytest.mark.launch]


def test_a_slow_link_is_worth_a_compression(tmp_path: Path) -> None:
    """50 Mbit/s: 2 MB take 310 ms each way, bf16 160 and int8 80: coding takes far less, also on a busy machine."""
    require_hosts()
    with EmulatedHosts(2, bandwidth="50mbit", burst="64kb") as hosts, Job(tmp_path / "logs") as job:
        for host in hosts:
            job.start(host, [sys.executable, compression_script.__file__, str(tmp_path)], host.environment())
        job.wait()
        lines = [[x for x in job.output(i).splitlines() if x.startswith("compression='auto'")] for i in (0, 1)]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first["chosen"] == second["chosen"] == "int8"
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])
    assert [len(found) for found in lines] == [1, 0]
    assert lines[0][0].startswith("compression='auto': int8. A step's 1.96 MB of gradients take: none ")
