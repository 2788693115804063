"""A user's script for Ray Train with two workers: a run that is refused, one that is not, and one with a loss.

Its argument is the folder for their weights, and for an error.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

from tests.strategies.tasks import Case, Classifier, make_trainer, state, train_loader

CASE, LOSS = Case(num_samples=16, max_epochs=1), Case(num_samples=16, max_epochs=3)


def train(folder: Path, devices: Any, case: Case = CASE, strategy: str = "ring_ddp", **options: Any) -> None:
    from ray.train.lightning import RayLightningEnvironment

    module = Classifier()
    trainer = make_trainer(case, strategy, devices, plugins=[RayLightningEnvironment()], **options)
    trainer.fit(module, train_loader(case, trainer), ckpt_path="last" if options else None)
    torch.save(state(module), folder / f"{strategy}-{trainer.global_rank}.pt")


def work(config: dict[str, str]) -> None:
    """Trains, and then with ft_ddp, where rank 1 is lost in the second epoch: Ray begins anew."""
    from ray.train import get_context

    folder = Path(config["folder"])
    lost = folder / "lost"

    def step(trainer: Any, *rest: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 3 and not lost.exists():
            lost.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    if not lost.exists():
        for strategy in "ring_ddp", "ft_ddp":
            try:
                train(folder, "auto", strategy=strategy)
            except ValueError as error:
                (folder / f"{strategy}-error-{get_context().get_world_rank()}").write_text(str(error))
        train(folder, 2)
    callbacks = [LambdaCallback(on_train_batch_end=step), ModelCheckpoint(folder / "checkpoints", save_last=True)]
    train(folder, 2, LOSS, "ft_ddp", callbacks=callbacks, enable_checkpointing=True)


def main(folder: str) -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory(prefix="ray") as own:  # its sockets have to have short paths
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=10**8, _temp_dir=own)
        failures = FailureConfig(max_failures=1)
        scaling, run = ScalingConfig(num_workers=2), RunConfig(storage_path=folder, failure_config=failures)
        TorchTrainer(work, train_loop_config={"folder": folder}, scaling_config=scaling, run_config=run).fit()
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
