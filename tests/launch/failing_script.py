"""A user's script whose training breaks on one rank (-1: all): ``failing_script.py STRATEGY DEVICES RANK HOW``."""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_multigpu import RingDDPStrategy  # importing the pack makes its strategies known
from tests.launch.interrupted_script import Saves
from tests.strategies.tasks import Case, Classifier, make_trainer, train_loader


class OwnError(Exception):
    """An exception of the user's module."""


class Breaks(Classifier):
    def __init__(self, rank: int, how: str) -> None:
        super().__init__()
        self.rank = rank
        self.how = how
        self.is_done = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        is_here = self.rank in (-1, self.trainer.global_rank)
        due = self.how != "nothing" and is_here and self.trainer.global_step == 3
        if due and not self.is_done:
            self.is_done = True
            raise OwnError(f"the data on rank {self.trainer.global_rank} is spoilt")
        return super().training_step(batch, batch_idx)


def chosen(strategy: str, how: str) -> Any:
    if how in ("again", "survive"):
        return RingDDPStrategy(failure_timeout_s=5.0)
    return strategy


def main() -> None:
    strategy, devices, rank, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    place = os.environ["SAVE_TO"]
    case = Case(num_samples=48, max_epochs=3)
    callbacks: list[L.Callback] = [Saves()]
    saves = how == "raise"
    if saves:
        callbacks.append(ModelCheckpoint(os.path.join(place, "checkpoints"), every_n_train_steps=1))
    options = {"enable_checkpointing": saves, "default_root_dir": place}
    trainer = make_trainer(case, chosen(strategy, how), devices, callbacks=callbacks, **options)
    module = Breaks(rank, how)
    loader = train_loader(Case(num_samples=48), trainer)
    try:
        trainer.fit(module, loader)
    except Exception as error:
        if how != "survive" and not (how == "again" and isinstance(error, OwnError)):
            raise
        print("caught", flush=True)
        make_trainer(case, chosen(strategy, how), devices, default_root_dir=place).fit(Breaks(rank, "nothing"), loader)


if __name__ == "__main__":
    main()
