"""Communication cost of a training step on one host: torch's DDP, the ring, and shared memory.

    python -m benchmarks.one_host_step [--ranks 2 4]

The cost of communication is the time of a step less that of the same step without any, measured in turns in the same
processes. The model is an MLP of 6.3 M parameters (six Linear(1024, 1024) with ReLU and Linear(1024, 10)), batch 64 a
rank, SGD, one intra-op thread a rank.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.shared_memory.host_all_reduce import SharedMemoryAllReduce
from lightning_multigpu.engine.data_parallel.reducer import GradientReducer

BLOCKS = 12
STEPS = 5  # a block
NONE, STOCK = "no communication", "torch's DDP"


class Candidate:
    """A model of its own and one way to average its gradients."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reducer: GradientReducer | None = None
        self.seconds: list[float] = []
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
        self.module = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(1024, 10)))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)
        if name not in (NONE, STOCK):
            group = dist.new_group(backend="gloo")
            shared = HierarchicalAllReduce(SharedMemoryAllReduce(group), None) if name == "shared memory" else None
            self.reducer = GradientReducer(group, Meter(), all_reduce=shared)
            self.reducer.attach(self.module)

    def step(self, batch: torch.Tensor) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        with self.module.no_sync() if self.name == NONE else contextlib.nullcontext():
            self.module(batch).square().mean().backward()
        if self.reducer is not None:
            self.reducer.finish()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)


def measure(rank: int, num_ranks: int, directory: str) -> None:
    """One rank; the first one prints the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=num_ranks)
    candidates = [Candidate(name) for name in (NONE, STOCK, "ring", "shared memory")]
    batch = torch.randn(64, 1024)
    for block in range(BLOCKS + 1):
        for candidate in candidates:
            dist.barrier()
            for _ in range(STEPS):
                candidate.step(batch)
            if block == 0:
                candidate.seconds.clear()  # warming up
    if rank == 0:
        print(f"\n{num_ranks} ranks")
        none, stock = (statistics.median(candidate.seconds) for candidate in candidates[:2])
        for candidate in candidates:
            low, middle, high = (1e3 * value for value in statistics.quantiles(candidate.seconds, n=4))
            cost_ms, ratio = middle - 1e3 * none, (middle / 1e3 - none) / (stock - none)
            print(f"{candidate.name:>16}: {middle:6.1f} ms a step ({low:.1f} to {high:.1f}), "
                  f"communication {cost_ms:6.1f} ms = {ratio:.2f}", flush=True)  # fmt: skip
    dist.barrier()
    for candidate in candidates:
        if candidate.reducer is not None:
            candidate.reducer.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
          f"Python {platform.python_version()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; "
          f"load {os.getloadavg()[0]:.1f} before")  # fmt: skip
    for num_ranks in options.ranks:
        with tempfile.TemporaryDirectory() as directory:
            mp.spawn(measure, (num_ranks, directory), nprocs=num_ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
