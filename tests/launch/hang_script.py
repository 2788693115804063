"""A user's job of 2 ranks that wait for each other: ``hang_script.py START_METHOD HOW``.

"in turn" has a wait that ends as soon as a file of its name is in the directory ``GO_ON``, and then one for ever.
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

from benchmarks.gpu.card import Card
from lightning_multigpu import RingDDPStrategy
from tests import faults
from tests.strategies.tasks import Case, Classifier, eval_loader, make_trainer, train_loader

RANKS = 2
STEP = 2  # ranks compare their parameters in batches 0 and 1
HANG_REPORT_S = 2.0
FAILURE_TIMEOUT_S = 6.0
CASE = Case(num_samples=48)


def wait_for(name: str) -> None:
    while not (Path(os.environ["GO_ON"]) / name).exists():
        time.sleep(0.1)


def hold_interpreter_lock() -> None:
    """Reads from an empty pipe in C, so that no other thread of this process runs; a child ends that by ending."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        wait_for("interpreter lock")
        os._exit(0)
    os.close(write)
    ctypes.PyDLL(None).read(read, ctypes.create_string_buffer(1), 1)
    os.close(read)
    os.waitpid(child, 0)


class Waits(Classifier):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == STEP:
            self.wait(self.how, self.trainer.global_rank)
        return super().training_step(batch, batch_idx)

    def wait(self, how: str, rank: int) -> None:
        strategy: Any = self.trainer.strategy
        if how == "own" and rank == 0:
            dist.all_reduce(torch.zeros(3))
        elif how == "different" and rank == 0:
            strategy.barrier()
        elif how == "behind" and rank == 1:
            wait_for("rank 1")
        elif how == "in turn" and rank == 1:
            hold_interpreter_lock()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.trainer.strategy.barrier("validation")
        super().validation_step(batch, batch_idx)


def main() -> None:
    method, how = sys.argv[1:]
    callbacks: list[Callback] = []
    if how == "in turn":
        callbacks = [faults.plant(faults.hang, rank=1, step=STEP + 2, where="validation")]
    strategy = RingDDPStrategy(
        start_method=method,  # type: ignore[arg-type]
        failure_timeout_s=FAILURE_TIMEOUT_S,
        hang_report_s=HANG_REPORT_S,
    )
    place = os.environ["GO_ON"]
    options = Card.of_environment().place(strategy, RANKS)
    trainer = make_trainer(CASE, ranks=RANKS, callbacks=callbacks, default_root_dir=place, **options)
    trainer.fit(Waits(how), train_loader(CASE, RANKS), eval_loader())


if __name__ == "__main__":
    main()
