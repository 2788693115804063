"""A user's training script: ten steps in float64. Run as a program or imported."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_multigpu import HybridStrategy
from tests.strategies.tasks import Case, Classifier, make_trainer, state, train_loader

CASE = Case(num_samples=40, max_epochs=-1)


def train(root: Path, *, strategy: Any = "auto", devices: int = 1, **options: Any) -> dict[str, Tensor]:
    module = Classifier()
    trainer = make_trainer(CASE, strategy, devices, max_steps=10, default_root_dir=root, **options)
    trainer.fit(module, train_loader(CASE, trainer))
    print(f"\nfinished as rank {trainer.global_rank} of {trainer.world_size}", flush=True)
    return state(module)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--mesh", type=int, nargs=3, help="sizes of data, pipeline and tensor, for hybrid")
    parser.add_argument("--devices", type=int, default=1)
    given = parser.parse_args()
    strategy: Any = "ring_ddp"
    if given.mesh is not None:
        sizes = ("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size")
        strategy = HybridStrategy(**dict(zip(sizes, given.mesh, strict=True)))
    weights = train(given.root, strategy=strategy, devices=given.devices, num_nodes=2)
    torch.save(weights, given.root / f"weights-{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main()
