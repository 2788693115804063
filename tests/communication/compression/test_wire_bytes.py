"""The bytes that compression announces are those that the interfaces of two hosts have counted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lightning_multigpu.emulation import EmulatedHosts
from tests.communication.compression import wire_script
from tests.launch.job import Job
from tests.launch.test_wire_bytes import (
    HEADERS_BYTES,
    MODELLED_FROM_BYTES,
    PAYLOAD_OF_A_FRAME_BYTES,
    counted,
)

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
            interface, sent_again = counted(entry["before"], entry["after"])
            frames = interface.sent_packets - sent_again
            frame_bytes = HEADERS_BYTES + PAYLOAD_OF_A_FRAME_BYTES
            payload_bytes = interface.sent_bytes - sent_again * frame_bytes - HEADERS_BYTES * frames
            # How many acknowledgements travel alone depends on how evenly the two directions are loaded.
            assert payload_bytes == pytest.approx(entry["sent_bytes"], rel=0.01)
