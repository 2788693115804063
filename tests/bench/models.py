"""Models and data as a user brings them, and a strategy that fails; ranks import this module."""

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader


class Tiny(LightningModule):
    """One weight; ``example_batch`` where it is asked for."""

    default_batch_size = 3

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1, bias=False)

    def example_batch(self, batch_size: int) -> Tensor:
        return torch.ones(batch_size, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnModel(Tiny):
    """Brings no data, and takes an argument that a configuration file gives."""

    example_batch = None  # type: ignore[assignment]

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, width, bias=False)


class OwnData(LightningDataModule):
    """Its epoch is shorter than a turn."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.ones(8, 2), batch_size=2)  # type: ignore[arg-type]


class BreaksOnRankOne(DDPStrategy):
    def on_train_start(self) -> None:
        super().on_train_start()
        if self.global_rank == 1:
            raise RuntimeError("planted")
