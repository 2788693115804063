"""Planted faults: at the place and the step that was asked for, once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from tests import faults
from tests.strategies.tasks import Case, Classifier, eval_loader, make_trainer, train_loader

CASE = Case(num_samples=32, max_epochs=3, global_batch_size=8)
RAISES = partial(faults.raise_error, ZeroDivisionError("here"))


class Progress(Callback):
    """Keeps what happened, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.events.append(f"trained {trainer.global_step}")

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        self.events.append(f"validated at {trainer.global_step}")

    def on_fit_end(self, trainer: Any, *args: Any) -> None:
        self.events.append("fit ended")


def train(fault: Callback, directory: Path, **loader: Any) -> Progress:
    """Three epochs of four steps, with validation and a checkpoint after each; the fault's exception is passed over."""
    progress = Progress()
    saves = ModelCheckpoint(directory, save_on_train_epoch_end=True)
    trainer = make_trainer(CASE, "auto", 1, callbacks=[fault, progress, saves], enable_checkpointing=True)
    try:
        trainer.fit(Classifier(), train_loader(CASE, 1, **loader), eval_loader())
    except ZeroDivisionError:
        progress.events.append("raised")
    return progress


@pytest.mark.parametrize(
    ("where", "step", "before"),
    [
        ("data", 6, ["trained 6"]),
        ("validation", 5, ["trained 8"]),
        ("saving", 5, ["validated at 8"]),
        ("end of fit", 5, ["validated at 12"]),
    ],
)
def test_on_one_device(where: faults.Where, step: int, before: list[str], tmp_path: Path) -> None:
    """Other places are in launch/test_fault_matrix.py and launch/test_failures.py."""
    fault = faults.plant(RAISES, rank=0, step=step, where=where)
    assert train(fault, tmp_path).events[-2:] == [*before, "raised"]


def test_in_a_worker_of_the_loader(tmp_path: Path) -> None:
    """Lightning ends persistent workers with the fit; others wait for 10 s to be terminated by the collector."""
    fault = faults.plant(RAISES, rank=0, step=2, where="data")
    events = train(fault, tmp_path, num_workers=2, persistent_workers=True).events
    assert [event for event in events if "trained" in event] == ["trained 1", "trained 2"]
    assert events[-1] == "raised"
