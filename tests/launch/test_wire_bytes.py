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
from pathlib import Path

import pytest

from lightning_multigpu.emulation import EmulatedHosts
from tests.hosts import require_hosts
from tests.launch import wire_script
from tests.launch.job import Job

pytestmark = [pytest.mark.hosts, pytest.mark.launch]

HEADERS_BYTES = 66
PAYLOAD_OF_A_FRAME_BYTES = 1448
SIZE_BYTES = 4 * (wire_script.NUM_FEATURES**2 + wire_script.NUM_FEATURES)  # of the gradients


def test_a_step_of_ring_ddp_sends_its_gradients_once_around_the_ring(tmp_path: Path) -> None:
    """The interface has sent this payload from the end of the first step on, which also joins groups.

    What TCP sends again, because a loaded machine has dropped or delayed it, is nobody's payload. Some of it passes the
    interface a second time, and some never passed it before.
    """
    require_hosts()
    with EmulatedHosts(2, bandwidth="1gbit", burst="512kb") as hosts, Job(tmp_path / "logs") as job:
        for host in hosts:
            host.namespace.run("ip", "link", "set", "eth0", "gso_max_segs", "1")  # counted frame by frame
            job.start(host, [sys.executable, wire_script.__file__, str(tmp_path)], host.environment())
        job.wait()
    for rank in (0, 1):
        report = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert report["all_reduce_bytes"] == [SIZE_BYTES] * wire_script.NUM_STEPS
        counted, expected_bytes = report["counted"], sum(report["sent_bytes"][1:])
        sent = {name: counted[-1][name] - counted[0][name] for name in counted[0]}
        behind_headers_bytes = sent["sent_bytes"] - HEADERS_BYTES * sent["sent_packets"]
        sent_again_bytes = PAYLOAD_OF_A_FRAME_BYTES * sent["segments_sent_again"]
        assert 0.97 * expected_bytes <= behind_headers_bytes <= 1.03 * (expected_bytes + sent_again_bytes)
