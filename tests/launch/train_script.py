"""A user's training script: a float64 MLP, ten or more steps of SGD with momentum. Run as a program or imported."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import lightning_multigpu

GLOBAL_BATCH_SIZE = 8
NUM_SAMPLES = 40


class Dealt(Sampler[int]):
    """The samples of one rank, so that N ranks with batches of B / N see what one device sees with batches of B."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks

    def __len__(self) -> int:
        return NUM_SAMPLES // self.num_ranks

    def __iter__(self) -> Iterator[int]:
        size = GLOBAL_BATCH_SIZE // self.num_ranks
        for start in range(self.rank * size, NUM_SAMPLES, GLOBAL_BATCH_SIZE):
            yield from range(start, start + size)


class MLP(pl.LightningModule):
    def __init__(self, pause_s: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)
        self.pause_s = pause_s

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (NUM_SAMPLES,), generator=generator)
        strategy: Any = self.trainer.strategy
        rank = getattr(strategy, "data_parallel_rank", self.trainer.global_rank)
        ranks = getattr(strategy, "data_parallel_size", self.trainer.world_size)
        sampler = Dealt(rank, ranks)
        return DataLoader(TensorDataset(x, y), batch_size=GLOBAL_BATCH_SIZE // ranks, sampler=sampler)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.pause_s)
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def on_train_batch_end(self, *args: Any) -> None:
        print(f"\nstep {self.trainer.global_step}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(root: Path, *, max_steps: int = 10, pause_s: float = 0.0, **options: Any) -> dict[str, Tensor]:
    """Trains and returns the final weights."""
    module = MLP(pause_s)
    trainer = pl.Trainer(
        accelerator="cpu",
        precision="64-true",
        max_steps=max_steps,
        use_distributed_sampler=False,
        default_root_dir=root,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **options,
    )
    trainer.fit(module)
    print(f"\nfinished as rank {trainer.global_rank} of {trainer.world_size}", flush=True)
    return module.state_dict()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--strategy", default="ring_ddp")
    parser.add_argument("--mesh", type=int, nargs=3, help="sizes of data, pipeline and tensor, for hybrid")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=10)
    parser.add_argument("--pause-s", type=float, default=0.0)
    arguments = parser.parse_args()
    strategy = arguments.strategy
    if arguments.mesh is not None:
        data, pipeline, tensor = arguments.mesh
        strategy = lightning_multigpu.HybridStrategy(
            data_parallel_size=data, pipeline_parallel_size=pipeline, tensor_parallel_size=tensor
        )
    weights = train(
        arguments.root,
        max_steps=arguments.max_steps,
        pause_s=arguments.pause_s,
        strategy=strategy,
        devices=arguments.devices,
        num_nodes=arguments.nodes,
    )
    rank = torch.distributed.get_rank()
    torch.save(weights, arguments.root / f"weights-{rank}.pt")


if __name__ == "__main__":
    main()
