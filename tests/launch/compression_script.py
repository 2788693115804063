"""One rank a host: a fit with ``compression="auto"``; writes what was chosen, and the weights."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_multigpu import RingDDPStrategy
from tests.launch.wide import Wide, fit_wide


class Chooses(Wide):
    chosen = ""

    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        compressed = strategy.averaging.reducer.all_reduce.compressed
        self.chosen = "none" if compressed is None else compressed.compressor.name


def main() -> None:
    root = Path(sys.argv[1])
    L.seed_everything(1, verbose=False)
    module = Chooses(1000)
    fit_wide(module, root, RingDDPStrategy(compression="auto"), max_steps=3)
    found = {"chosen": module.chosen, "weights": module.state_dict()}
    torch.save(found, root / f"rank{os.environ['NODE_RANK']}.pt")


if __name__ == "__main__":
    main()
