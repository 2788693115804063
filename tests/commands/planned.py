"""A module, data and a machine of which ``plan`` makes plans, and what was done with them."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_multigpu.planning.scaling.machine import Link, Machine

SAMPLES, WIDTH = 8, 16
LAYERS = 4
MACHINE = Machine(
    name="this machine",
    device_type="cpu",
    devices=2,
    memory_bytes=8 << 30,
    inside=Link.straight(1e-5, 1e-10),
    between=Link.straight(1e-4, 1e-8),
)
events: list[str] = []
"""Hooks that were called; not in the module, whose attributes a plan puts back."""


class Model(L.LightningModule):
    """Of equal layers, each of which keeps its input for backward; it cannot be trained."""

    made: "list[Model]" = []  # noqa: RUF012

    def __init__(self, optimizer: str = "Adam") -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.behind = nn.Linear(WIDTH, 1, bias=False)
        self.optimizer = optimizer
        self.steps = 0
        self.initial = {name: value.clone() for name, value in self.state_dict().items()}
        Model.made.append(self)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        events.append("step")
        self.steps += 1
        loss: Tensor = self.behind(self.layers(self.before(batch[0]))).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.1)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        events.append("optimizer step")

    def teardown(self, stage: str) -> None:
        events.append("teardown")


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Data(L.LightningDataModule):
    batch_size = SAMPLES

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(2 * SAMPLES, WIDTH)), batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        raise AssertionError("a plan needs no validation data")
