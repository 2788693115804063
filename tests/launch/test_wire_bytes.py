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
SIZE_BYTES = 4 * (wire_script.NUM_FEATURES**2 + wire_script.NUM_FEATURES)  # of the gradients


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


def assert_sent(expected_bytes: int, counted: list[dict[str, int]]) -> None:
    """The interface has sent this payload from the end of the first step on, which also joins groups.

    What TCP sends again, because a loaded machine has dropped or delayed it, is nobody's payload. Some of it passes the
    interface a second time, and some never passed it before.
    """
    sent = {name: counted[-1][name] - counted[0][name] for name in counted[0]}
    behind_headers_bytes = sent["sent_bytes"] - HEADERS_BYTES * sent["sent_packets"]
    sent_again_bytes = PAYLOAD_OF_A_FRAME_BYTES * sent["segments_sent_again"]
    assert 0.97 * expected_bytes <= behind_headers_bytes <= 1.03 * (expected_bytes + sent_again_bytes)


def test_a_step_of_ring_ddp_sends_its_gradients_once_around_the_ring(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        training = report["training"]
        assert training["all_reduce_bytes"] == [SIZE_BYTES] * wire_script.NUM_STEPS
        assert_sent(sum(training["sent_bytes"][1:]), training["counted"])


@pytest.mark.parametrize("num_servers", [1, 2])
def test_servers_get_gradients_and_send_weights_once_a_step(reports: list[dict[str, Any]], num_servers: int) -> None:
    """N x S / K in and out at each of K servers, less what comes from the rank on the server's own host.

    One server, on host 0: rank 1 pushes S, and the server sends S to it. Two servers, one on each host: each rank
    pushes S/2 to the other host, whose server sends S/2 back. So in both cases each host sends S.
    """
    for report in reports:
        training = report[f"{num_servers} servers"]
        assert training["push_bytes"] == [SIZE_BYTES] * wire_script.NUM_STEPS
        assert_sent(SIZE_BYTES * (wire_script.NUM_STEPS - 1), training["counted"])
