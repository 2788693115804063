"""The logging of all monitors: where their figures stand in the files of loggers."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_multigpu.callbacks import CommunicationMonitor, DeviceUtilizationMonitor, ThroughputMonitor
from lightning_multigpu.callbacks.monitor import Monitor, keys_of
from tests.callbacks.training import FEATURES, Regression, batches, trainer
from tests.world import World

STEP = "throughput/step_ms"


class Logging(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(FEATURES, FEATURES), self.layer)  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def rows_of_a_fit(directory: Path, *, validates: bool = False, **options: Any) -> list[dict[str, str]]:
    logger = CSVLogger(directory)
    monitors = [ThroughputMonitor(), CommunicationMonitor(), DeviceUtilizationMonitor()]
    fit = trainer(directory, callbacks=monitors, logger=logger, **options)
    fit.fit(Logging(), batches(12 * fit.world_size), batches(4) if validates else None)
    if not fit.is_global_zero:
        return []
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def steps_of(rows: Sequence[dict[str, str]], *keys: str) -> list[int]:
    return [int(row["step"]) for row in rows if all(row.get(key) for key in keys)]


@pytest.mark.parametrize("monitor", [ThroughputMonitor, CommunicationMonitor, DeviceUtilizationMonitor])
def test_every_key_is_documented_where_it_is_measured(monitor: type[Monitor]) -> None:
    for key in keys_of(monitor.group):
        assert f"`{key}`" in (monitor.__doc__ or "")


@pytest.mark.parametrize("strategy", ["ring_ddp", "gpipe"])
def test_a_csv_file_had_a_row_for_the_loss_and_one_more_for_each_monitor(
    world2: World, tmp_path: Path, strategy: str
) -> None:
    """A user who read ``metrics.csv`` found four rows a step, and no loss beside any throughput."""
    options = {"strategy": strategy, "devices": 2, "max_epochs": 2, "log_every_n_steps": 1, "limit_train_batches": 3}
    rows, _ = world2.run(rows_of_a_fit, tmp_path, **options)
    assert steps_of(rows) == steps_of(rows, "loss", STEP) == [0, 1, 2, 3, 4, 5]
    assert steps_of(rows, "communication/total_ms")  # a step with transfers under way counts for the next row
    assert rows[0]["device/process_rss_bytes"]


def test_figures_of_an_interval_that_a_validation_or_an_epoch_ends_stand_in_its_row(tmp_path: Path) -> None:
    rows = rows_of_a_fit(tmp_path, log_every_n_steps=2, check_val_every_n_epoch=None, val_check_interval=3)
    assert steps_of(rows, STEP) == [1, 2]
    rows = rows_of_a_fit(tmp_path, validates=True, log_every_n_steps=2)
    assert steps_of(rows, STEP, "loss") == [1]
    assert steps_of(rows, STEP, "val_loss") == [2]
    assert len(rows) == 2
