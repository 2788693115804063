"""One rank a host: profiled fits of ring_ddp, one for each number of features; rank 0 writes the profiles."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_multigpu import RingDDPStrategy
from lightning_multigpu.callbacks import ProfilerReport


class Wide(pl.LightningModule):
    """4 x num_features^2 bytes of gradients."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.layer = nn.Linear(num_features, num_features, bias=False)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    root = Path(sys.argv[1])
    profiles = []
    for num_features in map(int, sys.argv[2:]):
        report = ProfilerReport(wait=1, warmup=0, active=2)
        trainer = pl.Trainer(
            accelerator="cpu",
            strategy=RingDDPStrategy(),
            devices=1,
            num_nodes=2,
            max_steps=5,  # the window, and the step behind it
            callbacks=[report],
            default_root_dir=root,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        trainer.fit(Wide(num_features), DataLoader(TensorDataset(torch.randn(20, num_features)), batch_size=2))
        profiles.append(report.profile)
    if os.environ["NODE_RANK"] == "0":
        (root / "profiles.json").write_text(json.dumps(profiles))


if __name__ == "__main__":
    main()
