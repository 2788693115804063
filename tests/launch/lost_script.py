"""A script whose ranks train on their own and can be lost: ``lost_script.py START_METHOD HOW AGAIN``.

Rank 1 ends after its third step; the others go on, and train a second time if AGAIN is "again".
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import lightning as L
import torch
from typing_extensions import override

from lightning_multigpu.runtime.process_groups import leave_world
from lightning_multigpu.strategies.base import MultiGPUStrategy
from tests.strategies.tasks import Case, Classifier, make_trainer, train_loader

RANKS = 3
LOST = 1


class OnItsOwn(MultiGPUStrategy):
    """Ranks that train without each other, as those of an asynchronous parameter server do between its answers."""

    replicas_differ = True

    @override
    def model_to_device(self) -> None:
        pass

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        return dataloader

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._leave_groups()
        leave_world()
        self.failure_watch.joined(lambda: None, RANKS)
        if not self.is_global_zero:
            self.failure_watch.can_be_lost()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.signals.agree(self.signals.received, may_act=True)


class Ends(L.Callback):
    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == LOST and trainer.global_step == 3:
            if self.how == "raise":
                raise ValueError("the data is spoilt")
            if self.how == "exit":
                os._exit(7)
            os.kill(os.getpid(), signal.SIGTERM if self.how == "terminate" else signal.SIGKILL)
        if trainer.global_rank != LOST and trainer.global_step == 4:
            while trainer.strategy.failure_watch.lost != [LOST]:
                time.sleep(0.05)


def main() -> None:
    start_method, how, again = sys.argv[1:]
    case = Case(num_samples=48, max_epochs=3)
    for _ in range(2 if again == "again" else 1):
        strategy: Any = OnItsOwn(start_method=start_method)  # type: ignore[arg-type]
        trainer = make_trainer(case, strategy, RANKS, callbacks=[Ends(how)])
        module = Classifier()
        before = [parameter.detach().clone() for parameter in module.parameters()]
        trainer.fit(module, train_loader(case, trainer))
        has_trained = not any(torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))
        print(f"rank {trainer.global_rank} has trained: {has_trained}", flush=True)


if __name__ == "__main__":
    main()
