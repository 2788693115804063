"""A user's long run that is signalled: ``interrupted_script.py STRATEGY PHASE``; it saves into ``SAVE_TO``.

PHASE is where the run stays until the signal comes: "training", "workers" (of a loader, in training), "validation",
"sanity", or "hang" (each rank in a collective that the other one never joins).
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_multigpu import RingDDPStrategy
from lightning_multigpu.callbacks import RunReport
from tests.strategies.tasks import Case, Classifier, eval_loader, make_trainer, train_loader

STEP_S = 0.05
IN_VALIDATION = ("validation", "sanity")


def say(text: str) -> None:
    """A line of its own, whatever other ranks write."""
    os.write(1, f"{text}\n".encode())


class Long(Classifier):
    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase = phase

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(STEP_S)
        if self.trainer.global_step == 2 and self.phase not in IN_VALIDATION:
            say(f"ready {self.trainer.global_rank} {os.getpid()}")
            if self.phase == "hang":  # both main threads wait in C code
                dist.barrier() if self.trainer.global_rank == 0 else dist.recv(torch.empty(1), src=0)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.phase in IN_VALIDATION:
            say(f"ready {self.trainer.global_rank} {os.getpid()}")
            for _ in range(round(600 / STEP_S)):
                time.sleep(STEP_S)


class Saves(L.Callback):
    """Saving is a collective while the job is whole."""

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        say(f"saw {trainer.global_rank} {type(exception).__name__} {trainer.global_step}")
        trainer.save_checkpoint(os.path.join(os.environ["SAVE_TO"], "on_exception.ckpt"))


def main() -> None:
    method: Any = sys.argv[1]
    phase, place = sys.argv[2], os.environ["SAVE_TO"]
    case = Case(num_samples=48, max_epochs=1000)
    reports: list[L.Callback] = []
    if phase == "workers":
        reports = [RunReport(), ModelCheckpoint(place, filename="kept", save_on_exception=True)]
    patience_s = 4.0 if phase in ("hang", "validation") else 6.0
    trainer = make_trainer(
        case,
        RingDDPStrategy(start_method=method, failure_timeout_s=patience_s),
        2,
        callbacks=[Saves(), *reports],
        default_root_dir=place,
        enable_checkpointing=bool(reports),
        num_sanity_val_steps=1 if phase == "sanity" else 0,
    )
    workers: dict[str, Any] = {"num_workers": 1} if phase == "workers" else {}
    validation = eval_loader() if phase in IN_VALIDATION else None
    trainer.fit(Long(phase), train_loader(case, 2, **workers), validation)


if __name__ == "__main__":
    main()
