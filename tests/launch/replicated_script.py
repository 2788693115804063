"""One rank a host: a fit whose servers are on these hosts, then one whose servers are elsewhere; in both a server ends.

The ranks of the first fit are synchronous, and rank 0 kills a server of its host. Those of the second one are not.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from lightning_multigpu import ParameterServerStrategy
from tests.launch import train_script


class KillsServer(Callback):
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3 and trainer.is_global_zero:
            trainer.strategy._processes[0]._process.kill()


def main() -> None:
    root, *servers = sys.argv[1:]
    started: dict[str, Any] = {"num_servers": 2, "replicas": 1}
    elsewhere: dict[str, Any] = {"mode": "async", "servers": servers, "replicas": 1}
    for name, options, fitting in [
        ("sync", started, {"callbacks": [KillsServer()]}),
        ("async", elsewhere, {"pause_s": 0.3, "max_steps": 30, "max_epochs": 4}),
    ]:
        strategy = ParameterServerStrategy(failure_timeout_s=10, **options)
        weights = train_script.train(Path(root), strategy=strategy, devices=1, num_nodes=2, **fitting)
        Path(root, name).mkdir(exist_ok=True)
        torch.save(weights, Path(root, name, f"weights-{os.environ['NODE_RANK']}.pt"))


if __name__ == "__main__":
    main()
