"""Servers apart and on the hosts of the ranks: weights are those of one device, links carry what the formula says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lightning_multigpu.communication.job_secret import JOB_SECRET
from lightning_multigpu.emulation import EmulatedHosts, Host
from tests.hosts import require_hosts
from tests.launch import colocated_script, train_script, wire_script
from tests.launch.job import Job
from tests.launch.test_multi_node import assert_same_weights
from tests.launch.test_wire_bytes import HEADERS_BYTES, PAYLOAD_OF_A_FRAME_BYTES

pytestmark = [pytest.mark.hosts, pytest.mark.launch]

SIZE_BYTES = 4 * (wire_script.NUM_FEATURES**2 + wire_script.NUM_FEATURES)
PORTS = (7000, 7001, 7002)


class Counted(NamedTuple):
    """What a host has sent behind the headers of its frames, and frames that it has sent again."""

    sent_bytes: int
    segments_sent_again: int

    def __sub__(self, earlier: Counted) -> Counted:
        return Counted(*(now - before for now, before in zip(self, earlier, strict=True)))


def counted(host: Host) -> Counted:
    found = host.counters()
    names, values = (line.split() for line in host.run(["grep", "^Tcp:", "/proc/net/snmp"]).stdout.splitlines())
    segments = int(dict(zip(names, values, strict=True))["RetransSegs"])
    return Counted(found.sent_bytes - HEADERS_BYTES * found.sent_packets, segments)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Counted]:
    """The directory with what two ranks have written, and what the server apart has sent in the first of their fits."""
    require_hosts()
    root = tmp_path_factory.mktemp("colocated")
    secret = {JOB_SECRET: "0123456789abcdef" * 4}
    with EmulatedHosts(3, bandwidth="1gbit", burst="512kb", mtu=1500) as hosts, Job(root / "logs") as job:
        *nodes, apart = hosts
        before = counted(apart)
        for port in PORTS:
            serve = ["serve", "--host", apart.address, "--port", str(port), "--threads", "1"]
            job.start(apart, [sys.executable, "-m", "lightning_multigpu", *serve], secret)
        servers = [f"{apart.address}:{port}" for port in PORTS]
        for host in nodes:
            command = [sys.executable, colocated_script.__file__, str(root), *servers]
            job.start(host, command, {**host.environment(), **secret})
        job.wait_until(lambda: job.processes[0].poll() is not None, "the end of the first fit")
        sent = counted(apart) - before
        job.wait()
    return root, sent


def assert_sent(sent: Counted, expected_bytes: float) -> None:
    sent_again_bytes = PAYLOAD_OF_A_FRAME_BYTES * sent.segments_sent_again
    assert 0.97 * expected_bytes <= sent.sent_bytes <= 1.03 * (expected_bytes + sent_again_bytes)


def test_each_link_carries_what_the_formula_says(job: tuple[Path, Counted]) -> None:
    """With n = 2 and k = 1 a server apart has S/2 and each of the others S/4, so that each host sends S in a step.

    A rank pushes 3/4 S to other hosts, and its host's server sends 1/4 S to the other rank; the server apart sends
    S/2 to two ranks. With even shares it would send 2/3 S.
    """
    root, sent_apart = job
    assert_sent(sent_apart, wire_script.NUM_STEPS * SIZE_BYTES)
    for rank in (0, 1):
        report: dict[str, Any] = json.loads((root / f"rank{rank}.json").read_text())
        assert report["push_bytes"] == [SIZE_BYTES] * wire_script.NUM_STEPS
        first, last = report["counted"][0], report["counted"][-1]
        now = {name: last[name] - first[name] for name in last}
        sent = Counted(now["sent_bytes"] - HEADERS_BYTES * now["sent_packets"], now["segments_sent_again"])
        assert_sent(sent, (wire_script.NUM_STEPS - 1) * SIZE_BYTES)


def test_weights_are_those_of_one_device(job: tuple[Path, Counted], tmp_path: Path) -> None:
    assert_same_weights(job[0] / "sync", train_script.train(tmp_path, strategy="auto", devices=1))


def test_asynchronous_ranks_end_with_the_same_weights(job: tuple[Path, Counted]) -> None:
    first, second = (torch.load(job[0] / "async" / f"weights-{rank}.pt") for rank in (0, 1))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.isfinite(value).all()
        assert torch.equal(value, second[name]), f"{name} differs between the hosts"
