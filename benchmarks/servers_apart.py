"""A training step of two hosts whose parameter servers are on further hosts, against ring_ddp and the network's limit.

    lightning-multigpu emulate --nodes 3 --devices 1 --bandwidth 1gbit --burst 512kb -- \\
        python -m benchmarks.servers_apart --servers 1

The first N hosts train; each further one, K of them, runs a server. For S bytes of gradients and B bytes a second the
exchange takes max(S/B, N S/(K B)) at least: each worker pushes and pulls S, each server N S/K, both ways at once. With
servers on the workers' hosts as well (``colocated=True``, for K < N) it takes 2 N (N-1) S / ((N^2 + K N - 2 K) B).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import Any

from lightning_multigpu import ParameterServerStrategy
from lightning_multigpu.communication.interface import source_address
from lightning_multigpu.communication.job_secret import JOB_SECRET

_PORTS = {"Apart": 7000, "Colocated": 7001}
_NETWORK = "10.77.0"  # of emulated hosts, which count from 1
_SERVERS = "BENCHMARK_SERVERS"


class Apart(ParameterServerStrategy):
    """Takes its servers from the environment, since they differ from run to run."""

    def __init__(self, **options: Any) -> None:
        port = _PORTS[type(self).__name__]
        super().__init__(servers=[f"{host}:{port}" for host in os.environ[_SERVERS].split(",")], **options)


class Colocated(Apart):
    """The same with a server on each worker's host too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(colocated=True, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="on the first N hosts (%(default)s)")
    parser.add_argument("--servers", type=int, default=1, metavar="K", help="on the next K hosts (%(default)s)")
    parser.add_argument("--bucket-cap-mb", type=float, default=4.0, metavar="MB", help="(%(default)s)")
    arguments, others = parser.parse_known_args()
    os.environ.setdefault(JOB_SECRET, "of this benchmark alone, which nobody else can reach")
    program = [sys.executable, "-m", "lightning_multigpu"]
    workers, servers = arguments.workers, arguments.servers
    ports = _PORTS if servers < workers else {"Apart": _PORTS["Apart"]}
    if int(os.environ["NODE_RANK"]) >= workers:
        serve = [*program, "serve", "--host", str(source_address(os.environ["MASTER_ADDR"])), "--port"]
        processes = [subprocess.Popen([*serve, str(port)]) for port in ports.values()]
        sys.exit(max(process.wait() for process in processes))
    os.environ[_SERVERS] = ",".join(f"{_NETWORK}.{workers + 1 + k}" for k in range(servers))
    module = __spec__.name if __spec__ else __name__
    named = [f"{module}.{name}:bucket_cap_mb={arguments.bucket_cap_mb}" for name in ports]
    command = [*program, "bench", "strategies", "--num-nodes", str(workers)]
    strategies = ["--devices", "1", "--strategies", "ring_ddp", *named, "--baseline", "ring_ddp"]
    os.execv(sys.executable, [*command, *strategies, *others])


if __name__ == "__main__":
    main()
