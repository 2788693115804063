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
import sys
from typing import Any

from lightning_multigpu import ParameterServerStrategy
from lightning_multigpu.communication.interface import source_address
from lightning_multigpu.communication.job_secret import JOB_SECRET

_WORKERS = 2
_PORT = 7000
_NETWORK = "10.77.0"  # of emulated hosts, which count from 1
_SERVERS = "BENCHMARK_SERVERS"


class Apart(ParameterServerStrategy):
    """Takes its servers from the environment, since they differ from run to run."""

    def __init__(self, **options: Any) -> None:
        super().__init__(servers=os.environ[_SERVERS].split(","), **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=1, metavar="K", help="on hosts 2 to K+1 (%(default)s)")
    parser.add_argument("--bucket-cap-mb", type=float, default=4.0, metavar="MB", help="(%(default)s)")
    arguments, others = parser.parse_known_args()
    os.environ.setdefault(JOB_SECRET, "of this benchmark alone, which nobody else can reach")
    program = [sys.executable, "-m", "lightning_multigpu"]
    if int(os.environ["NODE_RANK"]) >= _WORKERS:
        host = source_address(os.environ["MASTER_ADDR"])
        os.execv(sys.executable, [*program, "serve", "--host", str(host), "--port", str(_PORT)])
    os.environ[_SERVERS] = ",".join(f"{_NETWORK}.{_WORKERS + 1 + k}:{_PORT}" for k in range(arguments.servers))
    apart = f"{__spec__.name if __spec__ else __name__}.Apart"
    command = [*program, "bench", "strategies", "--num-nodes", str(_WORKERS)]
    apart += f":bucket_cap_mb={arguments.bucket_cap_mb}"
    strategies = ["--devices", "1", "--strategies", "ring_ddp", apart, "--baseline", "ring_ddp"]
    os.execv(sys.executable, [*command, *strategies, *others])


if __name__ == "__main__":
    main()
