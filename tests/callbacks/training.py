"""A tiny training run on a clock that stands still except where the run moves it, so that every rate is exact."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_multigpu.communication.metering.clocks import HostClock

BATCH_S = 0.5
VALIDATION_BATCH_S = 1000.0
FEATURES = 3


class HandClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def hand_clock(patch: pytest.MonkeyPatch) -> HandClock:
    """The clock of all throughput monitors of this process."""
    made = HandClock()
    patch.setattr("lightning_multigpu.callbacks.throughput.clock_of", lambda device: HostClock(made))
    return made


class Regression(LightningModule):
    """A training batch takes ``BATCH_S`` seconds on ``clock``, a validation batch ``VALIDATION_BATCH_S``."""

    def __init__(self, clock: HandClock | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(FEATURES, 1)
        self._clock = HandClock() if clock is None else clock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._clock.now_s += BATCH_S
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._clock.now_s += VALIDATION_BATCH_S
        self.log("val_loss", self.loss(batch))

    def loss(self, batch: Any) -> Tensor:
        return self.layer(inputs_of(batch)).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def inputs_of(batch: Any) -> Tensor:
    if isinstance(batch, dict):
        batch = batch["x"]
    elif isinstance(batch, list | tuple):
        batch = batch[0]
    elif not isinstance(batch, Tensor):
        batch = batch.x
    assert isinstance(batch, Tensor)
    return batch


class RecordingLogger(Logger):
    """Keeps what is logged, as ``(step, metrics)``."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "recording"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Namespace | dict[str, Any], *args: Any, **kwargs: Any) -> None: ...

    def curve(self, key: str) -> list[tuple[int | None, float]]:
        return [(step, metrics[key]) for step, metrics in self.rows if key in metrics]


def batches(num_samples: int, batch_size: int = 4) -> DataLoader[Any]:
    dataset: Dataset[Any] = TensorDataset(torch.ones(num_samples, FEATURES))
    return DataLoader(dataset, batch_size=batch_size)


def batch_list(sizes: Sequence[int]) -> DataLoader[Any]:
    made: list[Tensor] = [torch.ones(size, FEATURES) for size in sizes]
    return DataLoader(made, batch_size=None)  # type: ignore[arg-type]


def trainer(tmp_path: Path, **options: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "default_root_dir": tmp_path,
    }
    return Trainer(**{**quiet, **defaults, **options})
