"""One rank a host: a profiled fit of ring_ddp; rank 0 writes the profile."""

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

NUM_FEATURES = 1000


class Wide(pl.LightningModule):
    """4 MB of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, NUM_FEATURES, bias=False)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    root = Path(sys.argv[1])
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
    trainer.fit(Wide(), DataLoader(TensorDataset(torch.randn(20, NUM_FEATURES)), batch_size=2))
    if os.environ["NODE_RANK"] == "0":
        (root / "profiled.json").write_text(json.dumps(report.profile))


if __name__ == "__main__":
    main()
