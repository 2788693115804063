"""A script that trains under async_ps, and loses a rank: ``lost_script.py START_METHOD HOW AGAIN``.

Rank 1 ends after its third step; the others go on, and train a second time if AGAIN is "again".
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_multigpu import ParameterServerStrategy
from tests.job.guardian.job import is_alive
from tests.strategies.tasks import Case, Classifier, make_trainer, train_loader

RANKS = 3
LOST = 1


class Ends(L.Callback):
    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        pid = Path(tempfile.gettempdir()) / "pid"
        if trainer.global_rank == LOST and trainer.global_step == 3:
            pid.write_text(f"{os.getpid()}\n")
            if self.how == "raise":
                raise ValueError("the data is spoilt")
            if self.how == "exit":
                os._exit(7)
            os.kill(os.getpid(), signal.SIGTERM if self.how == "terminate" else signal.SIGKILL)
        if trainer.global_rank != LOST and trainer.global_step == 4:
            while not pid.exists() or is_alive(int(pid.read_text() or os.getpid())):
                time.sleep(0.05)


def main() -> None:
    start_method, how, again = sys.argv[1:]
    case = Case(num_samples=48, max_epochs=3)
    for _ in range(2 if again == "again" else 1):
        strategy: Any = ParameterServerStrategy(
            mode="async",
            start_method=start_method,  # type: ignore[arg-type]
            failure_timeout_s=6.0,
        )
        trainer = make_trainer(case, strategy, RANKS, callbacks=[Ends(how)], default_root_dir=tempfile.gettempdir())
        module = Classifier()
        before = [parameter.detach().clone() for parameter in module.parameters()]
        trainer.fit(module, train_loader(case, trainer))
        has_trained = not any(torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))
        print(f"rank {trainer.global_rank} has trained: {has_trained}", flush=True)


if __name__ == "__main__":
    main()
