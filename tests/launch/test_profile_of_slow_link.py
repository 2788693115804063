"""ProfilerReport between two hosts: a slow link is named, with what makes less of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lightning_multigpu.emulation import EmulatedHosts
from lightning_multigpu.report.profile import profile_text
from tests.hosts import require_hosts
from tests.launch import profile_script
from tests.launch.job import Job
from tests.report.profiles import loaded

pytestmark = [pytest.mark.hosts, pytest.mark.launch]


def test_a_slow_link_is_named_first(tmp_path: Path) -> None:
    """100 Mbit/s: gradients of 4 MB take 320 ms each way, and the computation of two samples a few ms."""
    require_hosts()
    with EmulatedHosts(2, bandwidth="100mbit", burst="64kb") as hosts, Job(tmp_path / "logs") as job:
        command = [sys.executable, profile_script.__file__, str(tmp_path)]
        for host in hosts:
            job.start(host, command, host.environment())
        job.wait()
    profile = json.loads((tmp_path / "profiled.json").read_text())
    first, *_ = profile["findings"]
    assert first["kind"] == "communication", profile_text.text(loaded(profile))
    # With nothing hidden both save half of the wait.
    assert 'Send half of the bytes between hosts: RingDDPStrategy(compression="bf16")' in first["remedy"]
    assert "Communicate half as often: Trainer(accumulate_grad_batches=2)" in first["remedy"]
