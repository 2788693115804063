"""A failure in validation: callbacks save, and read metrics that other ranks no longer compute with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchmetrics.classification import MulticlassAccuracy

from tests.strategies.tasks import Case, Classifier, eval_loader, make_trainer, train_loader
from tests.world import World, rank


class Spoilt(Classifier):
    """Predicts right on rank 0 and wrong on rank 1, which meets spoilt data in the second validation, once."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(num_classes=3, average="micro")
        self.is_spoilt = True

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy(torch.full((8,), rank()), torch.zeros(8, dtype=torch.int64))
        self.log("accuracy", self.accuracy)
        if self.is_spoilt and rank() == 1 and self.current_epoch and batch_idx:
            raise ValueError("spoilt")


def fit(module: Spoilt, directory: Path) -> float:
    saves = ModelCheckpoint(directory, "{epoch}", monitor="accuracy", save_top_k=-1, save_on_exception=True)
    case = Case(trainer={"max_epochs": 3})
    trainer = make_trainer(case, "ring_ddp", 2, callbacks=[saves], enable_checkpointing=True)
    trainer.fit(module, train_loader(case, 2), eval_loader())
    return float(trainer.callback_metrics["accuracy"])


def test_rank_0_saves_where_validation_has_failed_on_another_rank(world2: World, tmp_path: Path) -> None:
    """Its metric waited for the other rank: the run ended with an error about a connection, and nothing was saved."""

    def run() -> float:
        module = Spoilt()
        with pytest.raises(ValueError, match="spoilt"):
            fit(module, tmp_path / "failed")
        module.train().is_spoilt = False
        return fit(module, tmp_path / "again")

    assert world2.run(run, timeout_s=120) == [0.5, 0.5], "a later run computes with both ranks"
    assert sorted(path.name for path in (tmp_path / "failed").iterdir()) == ["epoch=0.ckpt", "epoch=1.ckpt"]
