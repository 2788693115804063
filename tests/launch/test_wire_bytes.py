"""The meter's bytes are the formula's, and those that the interfaces of two hosts have counted.

At 1 Gbit/s, burst 512 KiB, MTU 1500: a full frame is 1448 bytes of payload behind 66 bytes of headers, which are those
of Ethernet (14), IP (20) and TCP (20, and 12 of timestamps)::

    | 14 | 20 | 32 | up to 1448 bytes of payload |

In a ring both directions carry data at once, so acknowledgements ride on it; the few that travel alone are frames of
66 bytes too.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from lightning_multigpu.emulation import EmulatedHosts, InterfaceCounters
from tests.hosts import require_hosts
from tests.launch import wire_script
from tests.launch.job import Job

pytestmark = [pytest.mark.hosts, pytest.mark.launch]

HEADERS_BYTES = 66
PAYLOAD_OF_A_FRAME_BYTES = 1448
# Each message of Gloo and each of our segments has a header; below this size they are no longer small against it.
MODELLED_FROM_BYTES = 1_000_000


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two ranks have written."""
    require_hosts()
    root = tmp_path_factory.mktemp("wire")
    with EmulatedHosts(2, bandwidth="1gbit", burst="512kb", mtu=1500) as hosts, Job(root / "logs") as job:
        for host in hosts:
            job.start(host, [sys.executable, wire_script.__file__, str(root)], host.environment())
        job.wait()
    return [json.loads((root / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def counted(before: dict[str, int], after: dict[str, int]) -> tuple[InterfaceCounters, int]:
    """What the interface has counted in between, and how many frames of it TCP has sent again."""
    difference = {name: after[name] - before[name] for name in after}
    sent_again = difference.pop("sent_again")
    return InterfaceCounters(**difference), sent_again


def assert_agree(payload_bytes: int, counts: tuple[InterfaceCounters, int]) -> None:
    """Within 3 %: the interface has sent this payload in full frames, and what it sent behind its headers, however
    many frames and lone acknowledgements, is this payload. What TCP sends again, because a loaded machine has dropped
    or delayed it, the kernel counts, and it is nobody's payload.
    """
    interface, sent_again = counts
    frame_bytes = HEADERS_BYTES + PAYLOAD_OF_A_FRAME_BYTES
    sent_bytes = interface.sent_bytes - sent_again * frame_bytes
    headers_bytes = HEADERS_BYTES * (interface.sent_packets - sent_again)
    assert sent_bytes == pytest.approx(payload_bytes * frame_bytes / PAYLOAD_OF_A_FRAME_BYTES, rel=0.03)
    assert sent_bytes - headers_bytes == pytest.approx(payload_bytes, rel=0.03)


@pytest.mark.parametrize("index", range(len(wire_script.SIZES)), ids=[f"{n} elements" for n in wire_script.SIZES])
def test_an_all_reduce_sends_what_the_formula_says(reports: list[dict[str, Any]], index: int) -> None:
    size_bytes = 4 * wire_script.SIZES[index]
    entries = [report["all_reduces"][index] for report in reports]
    # 2(N-1)/N x S for N = 2. Where N does not divide S the ranks' shares differ, but not their mean.
    assert sum(entry["sent_bytes"] for entry in entries) == 2 * size_bytes
    for entry in entries:
        assert abs(entry["sent_bytes"] - size_bytes) <= 4
        if size_bytes >= MODELLED_FROM_BYTES:
            assert_agree(entry["sent_bytes"], counted(entry["before"], entry["after"]))


def test_a_step_of_ring_ddp_sends_its_gradients_once_around_the_ring(reports: list[dict[str, Any]]) -> None:
    size_bytes = 4 * (wire_script.NUM_FEATURES**2 + wire_script.NUM_FEATURES)
    for report in reports:
        training = report["training"]
        assert training["all_reduce_bytes"] == [size_bytes] * wire_script.NUM_STEPS
        # Counted from the end of the first step, which also joins groups and distributes the model.
        counts = training["counted"]
        assert_agree(sum(training["sent_bytes"][1:]), counted(counts[0], counts[-1]))
