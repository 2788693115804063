"""One rank a host: a fit with ``compression="auto"``; writes what was chosen, and the weights."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_multigpu import RingDDPStrategy

NUM_FEATURES = 700


class Wide(pl.LightningModule):
    """2 MB of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.chosen = ""

    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        compressed = strategy.averaging.reducer.all_reduce.compressed
        self.chosen = "none" if compressed is None else compressed.compressor.name

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    root = Path(sys.argv[1])
    pl.seed_everything(1, verbose=False)
    module = Wide()
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=RingDDPStrategy(compression="auto"),
        devices=1,
        num_nodes=2,
        max_steps=3,
        default_root_dir=root,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(32, NUM_FEATURES)), batch_size=4))
    found = {"chosen": module.chosen, "weights": module.state_dict()}
    torch.save(found, root / f"rank{os.environ['NODE_RANK']}.pt")


if __name__ == "__main__":
    main()
