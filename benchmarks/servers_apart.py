"""A training step of two hosts whose parameter servers are on further hosts, against ring_ddp and the network's limit.

    lightning-multigpu emulate --nodes 3 --devices 1 --bandwidth 1gbit --burst 512kb -- \\
        python -m benchmarks.servers_apart --servers 1

Hosts 0 and 1 train; each further one, K of them, runs a server. For S bytes of gradients, N workers and B bytes a
second the exchange takes max(S/B, N S/(K B)) at least: each worker pushes and pulls S, each server N S/K, both ways at
once.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from typing import Any

from lightning_multigpu import ParameterServerStrategy
from lightning_multigpu.communication.interface import source_address
from lightning_multigpu.communication.job_secret import JOB_SECRET, job_secret
from lightning_multigpu.engine.parameter_server.server import Server

_WORKERS = 2
_PORT = 7000
_NETWORK = "10.77.0"  # of emulated hosts, which count from 1
_IDLE_S = 30.0
_SERVERS = "BENCHMARK_SERVERS"


class Apart(ParameterServerStrategy):
    """Takes its servers from the environment, since they differ from run to run."""

    def __init__(self, **options: Any) -> None:
        super().__init__(servers=os.environ[_SERVERS].split(","), **options)


def serve() -> None:
    """One job after the other, until none has come for a minute."""
    secret = job_secret(os.environ)
    host = source_address(os.environ["MASTER_ADDR"])
    assert secret is not None
    assert host is not None
    idle = False
    while not idle:
        server = Server(host, _PORT, bytes.fromhex(secret))
        timer = threading.Timer(_IDLE_S, lambda server=server: server._job or server.end("idle"))
        timer.start()
        idle = server.serve() == "idle"
        timer.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=1, metavar="K", help="on hosts 2 to K+1 (%(default)s)")
    parser.add_argument("--bucket-cap-mb", type=float, default=4.0, metavar="MB", help="(%(default)s)")
    arguments, others = parser.parse_known_args()
    os.environ.setdefault(JOB_SECRET, "of this benchmark alone, which nobody else can reach")
    if int(os.environ["NODE_RANK"]) >= _WORKERS:
        serve()
        return
    os.environ[_SERVERS] = ",".join(f"{_NETWORK}.{_WORKERS + 1 + k}:{_PORT}" for k in range(arguments.servers))
    apart = f"{__spec__.name if __spec__ else __name__}.Apart"
    command = [sys.executable, "-m", "lightning_multigpu", "bench", "strategies", "--num-nodes", str(_WORKERS)]
    apart += f":bucket_cap_mb={arguments.bucket_cap_mb}"
    strategies = ["--devices", "1", "--strategies", "ring_ddp", apart, "--baseline", "ring_ddp"]
    sys.exit(subprocess.call([*command, *strategies, *others]))


if __name__ == "__main__":
    main()
