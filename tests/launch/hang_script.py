"""A user's job of 2 ranks that wait for each other: ``hang_script.py START_METHOD HOW HANG_REPORT_S``.

It goes on as soon as the file ``GO_ON`` exists, where the way to wait allows that.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_multigpu import RingDDPStrategy, faults
from tests.strategies.tasks import Case, Classifier, eval_loader, make_trainer, train_loader

RANKS = 2
STEP = 2
FAILURE_TIMEOUT_S = 6.0


def wait_for_word() -> None:
    """Returns once the file is there."""
    while not Path(os.environ["GO_ON"]).exists():
        time.sleep(0.1)


def hold_interpreter_lock() -> None:
    """Reads from an empty pipe in C, so that no other thread of this process runs; a child ends it by closing it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        wait_for_word()
        os._exit(0)
    os.close(write)
    ctypes.PyDLL(None).read(read, ctypes.create_string_buffer(1), 1)
    os.waitpid(child, 0)


class Waits(Classifier):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == STEP and self.trainer.training:
            self.wait(self.trainer.global_rank)
        return super().training_step(batch, batch_idx)

    def wait(self, rank: int) -> None:
        strategy: Any = self.trainer.strategy
        if self.how == "one rank's own" and rank == 0:
            dist.all_reduce(torch.zeros(3))
        elif self.how == "one rank's noted" and rank == 1:
            self.all_gather(torch.zeros(3))
        elif self.how == "different":
            strategy.reduce(torch.zeros(3), dist.group.WORLD) if rank == 0 else self.world_gather(strategy)
        elif self.how == "interpreter lock" and rank == 1:
            hold_interpreter_lock()

    def world_gather(self, strategy: Any) -> None:
        strategy.all_gather(torch.zeros(3), dist.group.WORLD)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.how == "validation" and batch_idx == 0 and self.trainer.global_rank == 1:
            self.trainer.strategy.barrier()
        super().validation_step(batch, batch_idx)


class SavesSlowly(Callback):
    """Rank 0 takes its time over a checkpoint, and the others wait for it."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == STEP:
            if trainer.global_rank == 0:
                wait_for_word()
            trainer.strategy.barrier("saved")


def main() -> None:
    method, how, hang_report_s = sys.argv[1:]
    callbacks: list[Callback] = []
    if how == "hang":
        callbacks.append(faults.at(rank=1, step=STEP).hang())
    if how == "slow save":
        callbacks.append(SavesSlowly())
    strategy = RingDDPStrategy(
        start_method=method,  # type: ignore[arg-type]
        failure_timeout_s=FAILURE_TIMEOUT_S,
        hang_report_s=float(hang_report_s),
    )
    options: dict[str, Any] = {"val_check_interval": 4} if how == "validation" else {}
    trainer = make_trainer(
        Case(num_samples=48), strategy, RANKS, callbacks=callbacks, num_sanity_val_steps=0, **options
    )
    loaders = [eval_loader()] if how == "validation" else []
    trainer.fit(Waits(how), train_loader(Case(num_samples=48), RANKS), *loaders)
    print(f"rank {trainer.global_rank} finished", flush=True)


if __name__ == "__main__":
    main()
