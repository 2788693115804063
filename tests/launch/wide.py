"""A layer whose gradients are large against everything else that travels in a step, for a rank on each of two hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.strategies.tasks import Case, make_trainer


class Wide(L.LightningModule):
    """4 x num_features^2 bytes of gradients, and those of the bias."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.layer = nn.Linear(num_features, num_features)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit_wide(module: Wide, root: Path, strategy: Any, *, max_steps: int, batch_size: int = 4, **options: Any) -> None:
    """Trains on the same batches at each call."""
    trainer = make_trainer(
        Case(precision="32-true", max_epochs=-1), strategy, 1, num_nodes=2, max_steps=max_steps, default_root_dir=root,
        **options,
    )  # fmt: skip
    data = torch.randn(2 * batch_size * max_steps, module.layer.in_features, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(TensorDataset(data), batch_size))
