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

from lightning_multigpu.emulation import EmulatedHosts
from tests.hosts import require_hosts
from tests.launch import wire_script
from tests.launch.job import Job

pytestmark = [pytest.mark.hosts, pytest.mark.launch]

HEADERS_BYTES = 66
PAYLOAD_OF_A_FRAME_BYTES = 1448


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two ranks have written."""
    require_hosts()
    root = tmp_path_factory.mktemp("wire")
    with EmulatedHosts(2, bandwidth="1gbit", burst="512kb") as hosts, Job(root / "logs") as job:
        for host in hosts:
            host.namespace.run("ip", "link", "set", "eth0", "gso_max_segs", "1")  # counted frame by frame
            job.start(host, [sys.executable, wire_script.__file__, str(root)], host.environment())
        job.wait()
    return [json.loads((root / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def assert_agree(metered_bytes: int, before: dict[str, int], after: dict[str, int]) -> None:
    """The meter's bytes are what TCP has brought to the peer, and the interface has sent this payload in full frames.

    What TCP sends again, because a loaded machine has dropped or delayed it, is nobody's payload. Some of it passes the
    interface a second time, and some never passed it before, so that the interface counts the payload at least, and the
    payload with all that was sent again at most.
    """
    counted = {name: after[name] - before[name] for name in after}
    payload_bytes, sent_again_bytes = counted["payload_bytes"], counted["sent_again_bytes"]
    assert payload_bytes == pytest.approx(metered_bytes, rel=0.03)
    behind_headers_bytes = counted["sent_bytes"] - HEADERS_BYTES * counted["sent_packets"]
    assert 0.97 * metered_bytes <= behind_headers_bytes <= 1.03 * (metered_bytes + sent_again_bytes)
    frames_per_payload = 1 + HEADERS_BYTES / PAYLOAD_OF_A_FRAME_BYTES
    assert counted["sent_bytes"] >= 0.97 * frames_per_payload * metered_bytes
    assert counted["sent_bytes"] <= 1.03 * frames_per_payload * (metered_bytes + sent_again_bytes)


def test_a_step_of_ring_ddp_sends_its_gradients_once_around_the_ring(reports: list[dict[str, Any]]) -> None:
    size_bytes = 4 * (wire_script.NUM_FEATURES**2 + wire_script.NUM_FEATURES)
    for report in reports:
        training = report["training"]
        assert training["all_reduce_bytes"] == [size_bytes] * wire_script.NUM_STEPS
        # Counted from the end of the first step, which also joins groups and distributes the model.
        counts = training["counted"]
        assert_agree(sum(training["sent_bytes"][1:]), counts[0], counts[-1])


@pytest.mark.parametrize("num_servers", [1, 2])
def test_servers_get_gradients_and_send_weights_once_a_step(reports: list[dict[str, Any]], num_servers: int) -> None:
    """N x S / K in and out at each of K servers, less what comes from the rank on the server's own host.

    One server, on host 0: rank 1 pushes S, and the server sends S to it. Two servers, one on each host: each rank
    pushes S/2 to the other host, whose server sends S/2 back. So in both cases each host sends S.
    """
    size_bytes = 4 * (wire_script.NUM_FEATURES**2 + wire_script.NUM_FEATURES)
    for report in reports:
        training = report[f"{num_servers} servers"]
        assert training["push_bytes"] == [size_bytes] * wire_script.NUM_STEPS
        first, last = training["counted"][0], training["counted"][-1]
        counted = {name: last[name] - first[name] for name in last}
        behind_headers_bytes = counted["sent_bytes"] - HEADERS_BYTES * counted["sent_packets"]
        sent_again_bytes = PAYLOAD_OF_A_FRAME_BYTES * counted["segments_sent_again"]
        expected_bytes = size_bytes * (wire_script.NUM_STEPS - 1)
        assert 0.97 * expected_bytes <= behind_headers_bytes <= 1.03 * (expected_bytes + sent_again_bytes)
