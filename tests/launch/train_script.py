"""A user's training script: ten or more steps in float64. Run as a program or imported."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_multigpu import HybridStrategy
from tests.strategies.tasks import Case, Classifier, make_trainer, state, train_loader

CASE = Case(num_samples=40, max_epochs=-1)


class Slow(Classifier):
    """Says each step, and may pause before it."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.pause_s = pause_s

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.pause_s)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        print(f"\nstep {self.trainer.global_step}", flush=True)


def train(
    root: Path, *, max_steps: int = 10, pause_s: float = 0.0, strategy: Any = "auto", devices: int = 1, **options: Any
) -> dict[str, Tensor]:
    """Trains and returns the final weights."""
    module = Slow(pause_s)
    trainer = make_trainer(CASE, strategy, devices, max_steps=max_steps, default_root_dir=root, **options)
    trainer.fit(module, train_loader(CASE, trainer))
    print(f"\nfinished as rank {trainer.global_rank} of {trainer.world_size}", flush=True)
    return state(module)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--mesh", type=int, nargs=3, help="sizes of data, pipeline and tensor, for hybrid")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=10)
    parser.add_argument("--pause-s", type=float, default=0.0)
    given = parser.parse_args()
    strategy: Any = "ring_ddp"
    if given.mesh is not None:
        sizes = ("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size")
        strategy = HybridStrategy(**dict(zip(sizes, given.mesh, strict=True)))
    options: dict[str, Any] = {"max_steps": given.max_steps, "pause_s": given.pause_s, "devices": given.devices}
    weights = train(given.root, strategy=strategy, num_nodes=2, **options)
    torch.save(weights, given.root / f"weights-{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main()
