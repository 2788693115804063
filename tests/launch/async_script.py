"""A script that trains under async_ps, and loses a rank: ``async_script.py DIRECTORY START_METHOD HOW``.

Each rank writes the samples whose gradients the server has to ``DIRECTORY/samples-RANK``, one line a batch. With a
further argument the program trains a second time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_multigpu import ParameterServerStrategy
from tests.job.guardian.job import eventually, is_alive
from tests.strategies.parameter_server.test_asynchronous_training import EPOCHS, Seen, loader
from tests.strategies.tasks import Case, make_trainer

RANKS, LOST = 3, 1
SMALL_BUCKET_MB = 100 / 2**20


class Writes(L.Callback):
    def __init__(self, directory: Path) -> None:
        self.directory, self.written = directory, 0

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        with (self.directory / f"samples-{trainer.global_rank}").open("a") as file:
            file.write(json.dumps(module.samples[self.written :]) + "\n")
        self.written = len(module.samples)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        print(f"rank {trainer.global_rank} ends at the rate {rate:.6f}", flush=True)


class LosesRank(L.Callback):
    """Rank 1 ends after its third batch, or is killed in its backward, when it has pushed a part of the gradients.

    The other ranks wait for that after their second batch, so that they leave three to rank 1.
    """

    def __init__(self, directory: Path, how: str) -> None:
        self.pid, self.how = directory / "pid", how

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.global_rank == LOST and self.how == "kill":
            module.first.weight.register_post_accumulate_grad_hook(lambda _: self._kill(trainer))

    def _kill(self, trainer: Any) -> None:
        if trainer.global_step == 2:
            (step,) = trainer.strategy.owned.steps.values()
            assert any(part.pushed is not None for part in step.transport._parts)
            time.sleep(0.5)  # a thread sends what was pushed
            self.pid.write_text(f"{os.getpid()}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == LOST and trainer.global_step == 3:
            self.pid.write_text(f"{os.getpid()}\n")
            if self.how == "raise":
                raise ValueError("the data is spoilt")
            if self.how == "exit":
                os._exit(7)
            os.kill(os.getpid(), signal.SIGTERM)
        elif trainer.global_rank != LOST and trainer.global_step == 2:
            has_ended = lambda: self.pid.exists() and not is_alive(int(self.pid.read_text() or os.getpid()))  # noqa: E731
            assert eventually(has_ended), "rank 1 has ended, or its own assertion has failed"


def main() -> None:
    directory, method, how, *again = Path(sys.argv[1]), *sys.argv[2:]
    start: Any = method
    for _ in range(2 if again else 1):
        module = Seen("adamw", schedule=True)
        strategy = ParameterServerStrategy(
            mode="async", start_method=start, bucket_cap_mb=SMALL_BUCKET_MB, failure_timeout_s=6.0
        )
        callbacks = [Writes(directory), LosesRank(directory, how)]
        options = {"callbacks": callbacks, "default_root_dir": directory}
        trainer = make_trainer(Case(max_epochs=EPOCHS), strategy, RANKS, **options)
        before = [parameter.detach().clone() for parameter in module.parameters()]
        trainer.fit(module, loader())
        has_trained = not any(torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))
        print(f"rank {trainer.global_rank} has trained: {has_trained}", flush=True)


if __name__ == "__main__":
    main()
