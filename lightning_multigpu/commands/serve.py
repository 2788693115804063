"""``lightning-multigpu serve``: a parameter server that is started by hand, on a machine of its own."""

from __future__ import annotations

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
your own have to be importable from the current directory, as for the workers. OMP_NUM_THREADS limits the cores.
"""


def run(name: str, arguments: Sequence[str]) -> int:
    """Serves one job, and ends this process: with 0 if the job has ended well, 130 after an interrupt, else 1."""
    OptionParser(f"{PROGRAM} {name}", _DESCRIPTION).parse(arguments)
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdigit() or not 1 <= int(port) <= 65_535:
        raise UsageError(
            f"MASTER_ADDR={address} MASTER_PORT={port}: a server finds the job by the address of rank 0 and a port "
            "of 1 to 65535; set both, as for the ranks"
        )
    from lightning_multigpu.engine.parameter_server.pair import PairEndedError
    from lightning_multigpu.engine.parameter_server.server import joined

    try:
        print(f"Waiting for the job at {address} port {port}", flush=True)
        server = joined(address, int(port))
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
