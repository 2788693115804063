"""A script that trains under async_ps, and loses a rank or the server: ``async_script.py DIRECTORY rank|server``.

Each rank writes the samples whose gradients the server has to ``DIRECTORY/samples-RANK``, one line a batch.
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
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_multigpu import ParameterServerStrategy
from tests.job.guardian.job import is_alive
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


class LosesRank(L.Callback):
    """Rank 1 is killed in the backward of its third batch, when it has pushed a part of the gradients.

    The other ranks wait for that after their second batch, so that they leave three to rank 1.
    """

    def __init__(self, directory: Path) -> None:
        self.pid = directory / "pid"

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.global_rank == LOST:
            module.first.weight.register_post_accumulate_grad_hook(lambda _: self._end(trainer))

    def _end(self, trainer: Any) -> None:
        if trainer.global_step == 2:
            (step,) = trainer.strategy.owned.steps.values()
            assert any(bucket.pushed is not None for bucket in step.transport._buckets)
            time.sleep(0.5)  # a thread sends what was pushed
            self.pid.write_text(f"{os.getpid()}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank != LOST and trainer.global_step == 2:
            while not self.pid.exists() or is_alive(int(self.pid.read_text() or os.getpid())):
                time.sleep(0.05)


class LosesServer(L.Callback):
    """The server is killed when rank 0 has trained on five batches of the second epoch."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and (trainer.current_epoch, batch_idx) == (1, 5):
            trainer.strategy._processes[0]._process.kill()
        elif not trainer.is_global_zero and (trainer.current_epoch, batch_idx) == (1, 1):
            while trainer.strategy.failure_watch.failure is None:  # it leaves the other batches to rank 0
                time.sleep(0.05)


def main() -> None:
    directory, what = Path(sys.argv[1]), sys.argv[2]
    module = Seen("adamw", schedule=True)
    strategy = ParameterServerStrategy(mode="async", bucket_cap_mb=SMALL_BUCKET_MB)
    callbacks: list[L.Callback] = [Writes(directory)]
    if what == "rank":
        callbacks.append(LosesRank(directory))
    else:
        callbacks += [LosesServer(), ModelCheckpoint(directory, every_n_train_steps=2, save_last=True)]
    trainer = make_trainer(
        Case(max_epochs=EPOCHS),
        strategy,
        RANKS if what == "rank" else 2,
        callbacks=callbacks,
        enable_checkpointing=what == "server",
        default_root_dir=directory,
    )
    trainer.fit(module, loader())
    print(f"rank {trainer.global_rank} ends at the rate {trainer.optimizers[0].param_groups[0]['lr']:.6f}", flush=True)


if __name__ == "__main__":
    main()
