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
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_multigpu import ParameterServerStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl

_PORT = "7000"


class Apart(ParameterServerStrategy):
    """Joins at a port that the servers know; ``bench strategies`` gives each strategy a port of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(servers="external", **options)

    @override
    def check_before_launch(self, trainer: pl.Trainer) -> None:
        os.environ["MASTER_PORT"] = _PORT
        super().check_before_launch(trainer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="on the first N hosts (%(default)s)")
    parser.add_argument("--servers", type=int, default=1, metavar="K", help="on the next K hosts (%(default)s)")
    parser.add_argument("--bucket-cap-mb", type=float, default=4.0, metavar="MB", help="(%(default)s)")
    arguments, others = parser.parse_known_args()
    program = [sys.executable, "-m", "lightning_multigpu"]
    workers, servers = arguments.workers, arguments.servers
    if int(os.environ["NODE_RANK"]) >= workers:
        os.execve(sys.executable, [*program, "serve"], {**os.environ, "MASTER_PORT": _PORT})
    options = f"num_servers={servers},bucket_cap_mb={arguments.bucket_cap_mb}"
    named = f"{__spec__.name if __spec__ else __name__}.Apart:{options}"
    command = [*program, "bench", "strategies", "--num-nodes", str(workers)]
    strategies = ["--devices", "1", "--strategies", "ring_ddp", named]
    os.execv(sys.executable, [*command, *strategies, *others])


if __name__ == "__main__":
    main()
