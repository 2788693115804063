"""A training step of two hosts whose parameter servers are on further hosts, against ring_ddp and the network's limit.

    lightning-multigpu emulate --nodes 3 --devices 1 --bandwidth 1gbit --burst 512kb -- \\
        python -m benchmarks.servers_apart --servers 1

The first N hosts train; each further one, K of them, runs a server. For S bytes of gradients and B bytes a second the
exchange takes max(S/B, N S/(K B)) at least: each worker pushes and pulls S, each server N S/K, both ways at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from lightning_multigpu import ParameterServerStrategy
from lightning_multigpu.communication.interface import source_address
from lightning_multigpu.communication.job_secret import JOB_SECRET

_PORT = "7000"
_NETWORK = "10.77.0"  # of emulated hosts, which count from 1
_SERVERS = "BENCHMARK_SERVERS"


class Apart(ParameterServerStrategy):
    """Takes its servers from the environment, since they differ from run to run."""

    def __init__(self, **options: Any) -> None:
        super().__init__(servers=[f"{host}:{_PORT}" for host in os.environ[_SERVERS].split(",")], **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="on the first N hosts (%(default)s)")
    parser.add_argument("--servers", type=int, default=1, metavar="K", help="on the next K hosts (%(default)s)")
    parser.add_argument("--bucket-cap-mb", type=float, default=4.0, metavar="MB", help="(%(default)s)")
    arguments, others = parser.parse_known_args()
    os.environ.setdefault(JOB_SECRET, "of this benchmark alone, which nobody else can reach")
    program = [sys.executable, "-m", "lightning_multigpu"]
    workers, servers = arguments.workers, arguments.servers
    if int(os.environ["NODE_RANK"]) >= workers:
        address = str(source_address(os.environ["MASTER_ADDR"]))
        os.execv(sys.executable, [*program, "serve", "--host", address, "--port", _PORT])
    os.environ[_SERVERS] = ",".join(f"{_NETWORK}.{workers + 1 + k}" for k in range(servers))
    named = f"{__spec__.name if __spec__ else __name__}.Apart:bucket_cap_mb={arguments.bucket_cap_mb}"
    command = [*program, "bench", "strategies", "--num-nodes", str(workers)]
    strategies = ["--devices", "1", "--strategies", "ring_ddp", named, "--baseline", "ring_ddp"]
    os.execv(sys.executable, [*command, *strategies, *others])


if __name__ == "__main__":
    main()
