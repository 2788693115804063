"""One rank a host: fits with a parameter server apart, on a further host, and one on each host of the ranks.

Writes what the interface counted, and the weights.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_multigpu import ParameterServerStrategy
from lightning_multigpu.communication.interface import interface_towards
from tests.launch import train_script, wire_script


def main() -> None:
    root, *servers = sys.argv[1:]
    rank = os.environ["NODE_RANK"]
    interface = interface_towards(os.environ["MASTER_ADDR"])
    assert interface is not None

    def strategy(**options: Any) -> ParameterServerStrategy:
        return ParameterServerStrategy(servers=[servers.pop(0)], colocated=True, **options)

    report = wire_script.training(interface, Path(root), strategy())
    Path(root, f"rank{rank}.json").write_text(json.dumps(report))
    for mode in ("sync", "async"):
        weights = train_script.train(Path(root), strategy=strategy(mode=mode), devices=1, num_nodes=2)
        Path(root, mode).mkdir(exist_ok=True)
        torch.save(weights, Path(root, mode, f"weights-{rank}.pt"))


if __name__ == "__main__":
    main()
