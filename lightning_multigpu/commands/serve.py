"""``lightning-multigpu serve``: a parameter server that is started by hand, on a machine of its own."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from lightning_multigpu.commands.option_parser import OptionParser
from lightning_multigpu.commands.usage import PROGRAM, UsageError

_DESCRIPTION = f"""\
Run a parameter server on this machine. It joins a job whose workers wait for it:

  export MASTER_ADDR=10.0.0.4 MASTER_PORT=29500     # of the host of rank 0; the same for the workers
  {PROGRAM} serve
  Trainer(strategy=ParameterServerStrategy(servers="external", num_servers=1), devices=4)    # elsewhere

It waits for the job, holds its shard of the model and steps its optimizers, and ends with the job. Optimizer classes of
your own have to be importable from the current directory, as for the workers.
"""


def run(name: str, arguments: Sequence[str]) -> int:
    """Serves one job, and ends this process: with 0 if the job has ended well, 130 after an interrupt, else 1."""
    options = _checked(_parser(name).parse(arguments))
    import torch

    from lightning_multigpu.engine.parameter_server.pair import PairEndedError
    from lightning_multigpu.engine.parameter_server.server import joined

    if options.threads:
        torch.set_num_threads(options.threads)
    where = f"{options.master_addr} port {options.master_port}"
    try:
        print(f"Waiting for the job at {where}", flush=True)
        server = joined(options.master_addr, options.master_port)
        print(f"Serving as server {server.number} of {server.job.num_servers}", flush=True)
    except KeyboardInterrupt:
        return 130
    except (PairEndedError, RuntimeError) as error:
        print(f"The job has failed: {error}", flush=True)
        return 1
    try:
        problem = server.serve()
    except KeyboardInterrupt:
        os._exit(130)
    print(f"The job has failed: {problem}" if problem else "The job has ended", flush=True)
    os._exit(1 if problem else 0)


def _checked(options: argparse.Namespace) -> argparse.Namespace:
    if not options.master_addr or options.master_port is None:
        raise UsageError(
            "a server finds the job by the address of rank 0: pass --master-addr and --master-port, or set MASTER_ADDR "
            "and MASTER_PORT"
        )
    for option, value, smallest, largest in (
        ("--master-port", options.master_port, 1, 65_535),
        ("--threads", options.threads, 0, 1_024),
    ):
        if not smallest <= value <= largest:
            raise UsageError(f"{option} {value} is not between {smallest} and {largest}")
    return options


def _parser(name: str) -> OptionParser:
    parser = OptionParser(f"{PROGRAM} {name}", _DESCRIPTION)
    parser.add_argument(
        "--master-addr", default=os.environ.get("MASTER_ADDR"), metavar="ADDRESS", help="of rank 0 ($MASTER_ADDR)"
    )
    parser.add_argument(
        "--master-port",
        type=int,
        default=os.environ.get("MASTER_PORT"),
        metavar="N",
        help="of the job's store ($MASTER_PORT)",
    )
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="cores to average and update with (all that it may use)"
    )
    return parser
