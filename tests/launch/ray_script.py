"""A user's script for Ray Train with two workers. Its argument is the folder for their weights, and for an error."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.strategies.tasks import Case, Classifier, make_trainer, state, train_loader

CASE = Case(num_samples=16, max_epochs=1)


def train(folder: Path, devices: Any) -> None:
    from ray.train.lightning import RayLightningEnvironment

    module = Classifier()
    trainer = make_trainer(CASE, "ring_ddp", devices, plugins=[RayLightningEnvironment()])
    trainer.fit(module, train_loader(CASE, trainer))
    torch.save(state(module), folder / f"weights-{trainer.global_rank}.pt")


def work(config: dict[str, str]) -> None:
    from ray.train import get_context

    folder = Path(config["folder"])
    try:
        train(folder, "auto")
    except ValueError as error:
        (folder / f"error-{get_context().get_world_rank()}").write_text(str(error))
    train(folder, 2)


def main(folder: str) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory(prefix="ray") as own:  # its sockets have to have short paths
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=10**8, _temp_dir=own)
        scaling, run = ScalingConfig(num_workers=2), RunConfig(storage_path=folder)
        TorchTrainer(work, train_loop_config={"folder": folder}, scaling_config=scaling, run_config=run).fit()
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
