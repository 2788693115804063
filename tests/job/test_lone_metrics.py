"""A failure in validation: callbacks save, and read metrics that other ranks no longer compute with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchmetrics.classification import MulticlassAccuracy

from tests.strategies.tasks import Case, Classifier, eval_loader, make_trainer, train_loader
from tests.world import World, rank


class Spoilt(Classifier):
    """Meets spoilt data on rank 1, behind the first batch of the second validation."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(num_classes=3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy(torch.randn(8, 3), torch.zeros(8, dtype=torch.int64))
        self.log("accuracy", self.accuracy)
        if rank() == 1 and self.current_epoch and batch_idx:
            raise ValueError("spoilt")


def test_rank_0_saves_where_validation_has_failed_on_another_rank(world2: World, tmp_path: Path) -> None:
    """Its metric waited for the other rank: the run ended with an error about a connection, and nothing was saved."""

    def run() -> None:
        saves = ModelCheckpoint(tmp_path, "{epoch}", monitor="accuracy", save_top_k=-1, save_on_exception=True)
        case = Case(trainer={"max_epochs": 3})
        trainer = make_trainer(case, "ring_ddp", 2, callbacks=[saves], enable_checkpointing=True)
        trainer.fit(Spoilt(), train_loader(case, 2), eval_loader())

    world2.run_raising(ValueError, "spoilt", run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0.ckpt", "epoch=1.ckpt"]
