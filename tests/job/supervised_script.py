"""A script whose ranks, under the supervisor of ft_ddp, do what its arguments say; it needs no torchft.

``python -m tests.job.supervised_script NUM_RANKS RANK:START:ACTION ...``: what a rank does at that start (``*``: at
any) instead of waiting for the file ``end`` in its directory.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_multigpu.job import supervisor
from lightning_multigpu.job.run_context import RunContext
from lightning_multigpu.job.supervisor import SupervisorLauncher

_FAILS = "the data are spoilt"


def main() -> None:
    """One run, as ``Trainer.fit`` starts it."""
    ranks, plan = int(sys.argv[1]), dict(each.rsplit(":", 1) for each in sys.argv[2:])
    supervisor._STOPPED_S = 1.0
    supervisor._SAME_PAUSE_S = float(os.environ.get("PAUSE_S", 1.0))
    supervisor._BEAT_S = 0.1
    launcher = launcher_of(ranks)
    rank = int(os.environ.get("LOCAL_RANK", 0)) + ranks * int(os.environ.get("NODE_RANK", 0))
    start = os.environ.get(supervisor.STARTS)
    action = plan.get(f"{rank}:{start}", plan.get(f"{rank}:*", ""))
    if "LOCAL_RANK" in os.environ:
        with Path("starts").open("a") as file:
            file.write(f"{rank}:{start} {os.getpid()}\n")
        if action == "leaves early":
            sys.exit(3)
    launcher.launch(work, rank, action)
    if action == "fails after the fit":
        raise OSError(_FAILS)
    if action == "makes another Trainer":
        launcher_of(ranks + 1).launch(work, rank, action)


def launcher_of(ranks: int) -> SupervisorLauncher:
    run = RunContext(
        environment=LightningEnvironment(),
        devices=(torch.device("cpu"),) * ranks,
        num_nodes=int(os.environ.get("NUM_NODES", 1)),
        backend=None,
        failure_timeout_s=15,
        hang_report_s=None,
        join_timeout_s=60,
    )
    restarts = int(os.environ.get("MAX_RESTARTS", 3))
    return SupervisorLauncher(run, lighthouse, None, lambda trainer: None, max_restarts=restarts)


def lighthouse(host: str) -> tuple[object, str]:
    assert host == "127.0.0.1"
    return object(), f"http://{host}:1"


def work(rank: int, action: str) -> None:
    """What a rank does."""
    if action == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "raises":
        raise OSError(_FAILS)
    elif action == "leaves":
        sys.exit(143)
    elif action == "notes signals":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, _: print(f"rank {rank} got {number}", flush=True))
        Path(f"ready{rank}").touch()
    while not Path("end").exists() or action == "hangs":
        time.sleep(0.02)


if __name__ == "__main__":
    main()
