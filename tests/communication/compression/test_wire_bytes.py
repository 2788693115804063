"""The bytes that compression announces are those that the interfaces of two hosts have counted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lightning_multigpu.emulation import EmulatedHosts
from tests.communication.compression import wire_script
from tests.launch.job import Job
from tests.launch.test_wire_bytes import MODELLED_FROM_BYTES, assert_agree

pytestmark = [pytest.mark.hosts, pytest.mark.launch]


def test_interfaces_count_what_is_announced(hosts: EmulatedHosts, tmp_path: Path) -> None:
    with Job(tmp_path / "logs") as job:
        for host in hosts:
            job.start(host, [sys.executable, wire_script.__file__, str(tmp_path)], host.environment())
        job.wait()
    for rank in (0, 1):
        report = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert set(report) == set(wire_script.SETTINGS)
        for entry in report.values():
            assert entry["sent_bytes"] > MODELLED_FROM_BYTES
            assert_agree(entry["sent_bytes"], entry["before"], entry["after"], rel=0.01, in_full_frames=False)
