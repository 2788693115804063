"""Step time and memory of ``ddp_sharded`` against FairScale's OSS and ShardedDataParallel in a plain torch loop.

    python -m benchmarks.sharded_step [--ranks 2 4] [--models mlp gpt] [--turns 12] [--steps 5]
    python -m benchmarks.sharded_step --memory [--ranks 2 4] [--models mlp gpt]

The models: an MLP of 6.3 M parameters (six Linear(1024, 1024) with ReLU and Linear(1024, 10)), batch 64 a rank; and the
GPT of :mod:`benchmarks.plain_gpt` (6.5 M parameters), batch 8 a rank. AdamW in float32, one intra-op thread a rank.

All run in the same processes, in turns: within ``Trainer.fit`` a callback stops after some batches, and runs as many
steps of each plain loop. A step of the Trainer is from ``on_train_batch_start`` to ``on_train_batch_end``, so that the
hooks and loggers of Lightning count, and loading does not. The loops are FairScale's with the buckets of
``ddp_sharded`` (1 MiB a rank), with its own default (8 M elements), and stock DistributedDataParallel.

``--memory`` measures instead the bytes that each rank holds after its third step, under ``ddp_sharded`` and
``ring_ddp`` in the same processes. Beside the optimizer states is what FairScale's OSS predicts for the rank: two
moments of each parameter that OSS gives to it, and 4 bytes for the count of steps of each.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from benchmarks.heading import heading
from benchmarks.plain_gpt import batch_of, gpt, loss_of
from lightning_multigpu import RingDDPStrategy, ShardedStrategy
from lightning_multigpu.bench.strategies.models import repeated
from lightning_multigpu.engine.training_memory import measured_bytes
from tests.world import free_port

Batch = tuple[Tensor, Tensor]
OURS, ALIKE = "ddp_sharded", "FairScale, buckets of 1 MiB"


def mlp() -> nn.Sequential:
    layers = [layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


def mlp_batch(size: int) -> Batch:
    return torch.randn(size, 1024), torch.randint(10, (size,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch], Callable[[Tensor, Tensor], Tensor], int]] = {
    "mlp": (mlp, mlp_batch, F.cross_entropy, 64),
    "gpt": (gpt, batch_of, loss_of, 8),
}


class Module(L.LightningModule):
    """Trains one of the models."""

    def __init__(self, name: str) -> None:
        super().__init__()
        make, _, self.loss, _ = MODELS[name]
        self.layers = make()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Loop:
    """A plain loop with a model of its own."""

    def __init__(self, name: str, batch: Batch, wrap: Callable[[nn.Module], tuple[nn.Module, Any]]) -> None:
        make, _, self.loss, _ = MODELS[name]
        self.model, self.optimizer = wrap(make())
        self.batch = batch

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)  # FairScale's buckets would otherwise send old gradients
        self.loss(self.model(self.batch[0]), self.batch[1]).backward()
        self.optimizer.step()


def fairscale_with(bucket_elements: int) -> Callable[[nn.Module], tuple[nn.Module, Any]]:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim import OSS

    def wrap(model: nn.Module) -> tuple[nn.Module, Any]:
        optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-4)
        return ShardedDataParallel(model, optimizer, reduce_buffer_size=bucket_elements), optimizer

    return wrap


def stock_ddp(model: nn.Module) -> tuple[nn.Module, Any]:
    wrapped = DistributedDataParallel(model)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-4)


class Turns(L.Callback):
    """Times the Trainer's batches, and lets plain loops run between them."""

    def __init__(self, name: str, batch: Batch, steps: int) -> None:
        self.seconds: dict[str, list[float]] = {OURS: []}
        self.held: dict[str, int] = {}
        self._name, self._batch, self._steps = name, batch, steps
        self._own: list[float] = []

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        ways = {ALIKE: fairscale_with(2**18), "FairScale, its default": fairscale_with(2**23), "DDP": stock_ddp}
        self.loops = {name: Loop(self._name, self._batch, wrap) for name, wrap in ways.items()}
        self.seconds |= {name: [] for name in self.loops}

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._start_s = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._own.append(time.perf_counter() - self._start_s)
        if len(self._own) < self._steps:
            return
        self.seconds[OURS].append(statistics.median(self._own))
        self._own = []
        for name, loop in self.loops.items():
            dist.barrier()
            found = []
            for _ in range(self._steps):
                start_s = time.perf_counter()
                loop.step()
                found.append(time.perf_counter() - start_s)
            self.seconds[name].append(statistics.median(found))
        self.held = {OURS: measured_bytes(pl_module.parameters(), trainer.optimizers).optimizer_bytes} | {
            name: measured_bytes([], [getattr(loop.optimizer, "optim", loop.optimizer)]).optimizer_bytes
            for name, loop in self.loops.items()
        }
        dist.barrier()


class Holds(L.Callback):
    """Notes the bytes that each rank holds after a batch, and what OSS predicts for its optimizer states."""

    def __init__(self, name: str) -> None:
        self._make = MODELS[name][0]

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        from fairscale.optim import OSS

        shards = OSS(self._make().parameters(), optim=torch.optim.AdamW, lr=1e-4).partition_parameters()
        own = [parameter for group in shards[trainer.global_rank] for parameter in group["params"]]
        predicted_bytes = sum(2 * parameter.nbytes + 4 for parameter in own)
        held = trainer.strategy.held_bytes()  # type: ignore[attr-defined]
        self.of_ranks: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(self.of_ranks, (held, predicted_bytes))


def show_memory(title: str, found: dict[str, Holds]) -> None:
    print(title)
    for name, holds in found.items():
        for rank, (held, predicted_bytes) in enumerate(holds.of_ranks):
            against = f"   predicted {predicted_bytes / 1e6:6.2f} MB, measured / predicted "
            against += f"{held.optimizer_bytes / predicted_bytes:.3f}"
            print(
                f"  {name:<12} rank {rank}   parameters {held.parameters_bytes / 1e6:6.2f} MB   gradients "
                f"{held.gradients_bytes / 1e6:6.2f} MB   optimizer states {held.optimizer_bytes / 1e6:6.2f} MB"
                f"{against if name == OURS else ''}",
                flush=True,
            )


def trainer_of(ranks: int, strategy: Any, callback: L.Callback) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, plugins=[LightningEnvironment()], max_epochs=1,
        callbacks=[callback], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip


def measure(rank: int, ranks: int, port: int, given: argparse.Namespace) -> None:
    """One rank; the first one prints."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), NODE_RANK="0")
    os.environ["WORLD_SIZE"] = str(ranks)
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    for name in given.models:
        _, batch_for, _, size = MODELS[name]
        torch.manual_seed(0)
        batch = batch_for(size)
        if given.memory:
            found = {OURS: Holds(name), "ring_ddp": Holds(name)}
            for strategy, holds in zip((ShardedStrategy(), RingDDPStrategy()), found.values(), strict=True):
                trainer_of(ranks, strategy, holds).fit(Module(name), repeated(batch, size, 3, ranks))
            if rank == 0:
                show_memory(f"{name}, {ranks} ranks", found)
            continue
        turns = Turns(name, batch, given.steps)
        trainer = trainer_of(ranks, ShardedStrategy(), turns)
        trainer.fit(Module(name), repeated(batch, size, given.steps * (given.turns + 1), ranks))
        if rank == 0:
            show(f"{name}, {ranks} ranks", turns)


def show(title: str, turns: Turns) -> None:
    print(title)
    medians = {name: statistics.median(seconds[1:]) for name, seconds in turns.seconds.items()}  # the first warms up
    for name, seconds in turns.seconds.items():
        ratios = [own / other for own, other in zip(turns.seconds[OURS][1:], seconds[1:], strict=True)]
        low, _, high = statistics.quantiles(seconds[1:], n=4)
        print(
            f"  {name:<28} {1e3 * medians[name]:8.2f} ms a step ({1e3 * low:.2f} to {1e3 * high:.2f})   "
            f"{OURS} / this {statistics.median(ratios):.2f}   states on rank 0 {turns.held[name] / 1e6:.1f} MB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="measure the bytes that each rank holds, not times")
    given = parser.parse_args()
    print(heading(), flush=True)
    for ranks in given.ranks:
        mp.spawn(measure, (ranks, free_port(), given), nprocs=ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
