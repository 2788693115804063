"""Step time of layers that are split over two ranks, against DTensor, FairScale, no communication, and one process.

    python -m benchmarks.tensor_split [--sizes 128x64 512x256 1024x512] [--turns 9]

The model is 4 x Linear(d, 4 d) - GELU - Linear(4 d, d); a size is d and the rows of a batch. A step is forward,
backward and SGD, with one intra-op thread a rank. "without communication" has layers of the parts' sizes. The ways take
turns; the one process computes while the other rank waits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import fairscale.nn.model_parallel as fairscale
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.heading import heading
from lightning_multigpu.engine.tensor_split.layers import ColumnSplitLinear, RowSplitLinear
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup

_RANKS = 2
_BLOCKS = 4
_TURN_S = 0.5


def chain(first: Callable[[], nn.Module], second: Callable[[], nn.Module]) -> nn.Sequential:
    """Blocks of two layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(_BLOCKS) for layer in (first(), nn.GELU(), second())))


def models(width: int, group: TensorGroup) -> dict[str, nn.Module]:
    """The same blocks in each way."""
    hidden, part = 4 * width, 4 * width // _RANKS

    def whole() -> nn.Sequential:
        return chain(lambda: nn.Linear(width, hidden), lambda: nn.Linear(hidden, width))

    plan = {str(3 * block + layer): (ColwiseParallel(), RowwiseParallel())[layer // 2]
            for block in range(_BLOCKS) for layer in (0, 2)}  # fmt: skip
    return {
        "split": chain(
            lambda: ColumnSplitLinear(width, hidden, group=group), lambda: RowSplitLinear(hidden, width, group=group)
        ),
        "DTensor": parallelize_module(whole(), init_device_mesh("cpu", (_RANKS,)), plan),
        "FairScale": chain(
            lambda: fairscale.ColumnParallelLinear(width, hidden, gather_output=False),
            lambda: fairscale.RowParallelLinear(hidden, width, input_is_parallel=True),
        ),
        "without communication": chain(lambda: nn.Linear(width, part), lambda: nn.Linear(part, width)),
        "one process": whole(),
    }


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Forward, backward and update."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def work(rank: int, port: int, sizes: Sequence[tuple[int, int]], turns: int) -> None:
    """Times all ways on one rank; the first one prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=_RANKS)
    fairscale.initialize_model_parallel(_RANKS)
    group = TensorGroup(dist.group.WORLD)
    for width, rows in sizes:
        ways = models(width, group)
        optimizers = {name: torch.optim.SGD(model.parameters(), lr=1e-4) for name, model in ways.items()}
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))

        found: dict[str, list[float]] = {name: [] for name in ways}
        steps = 1
        for turn in range(turns + 1):
            for name, seconds in found.items():
                dist.barrier()
                start_s = time.perf_counter()
                if name != "one process" or rank == 0:
                    for _ in range(steps):
                        step(ways[name], optimizers[name], x)
                dist.barrier()
                if turn:  # the first one warms up
                    seconds.append((time.perf_counter() - start_s) / steps)
                elif name == "split":
                    counted = torch.tensor([max(1.0, _TURN_S / (time.perf_counter() - start_s))])
                    dist.broadcast(counted, 0)
                    steps = min(50, int(counted))
        if rank == 0:
            _print(width, rows, found, ways)
    group.close()
    dist.destroy_process_group()


def _print(width: int, rows: int, found: dict[str, list[float]], ways: dict[str, nn.Module]) -> None:
    numels = {name: sum(parameter.numel() for parameter in model.parameters()) for name, model in ways.items()}
    print(f"d={width}, {rows} rows; {numels['split'] / numels['one process']:.3f} of the parameters on each rank")
    for name, seconds in found.items():
        ratio = statistics.median(ours / other for ours, other in zip(found["split"], seconds, strict=True))
        low, middle, high = (1e3 * value for value in statistics.quantiles(seconds, n=4))
        print(f"  {name:22} {middle:9.2f} ms  ({low:.2f} - {high:.2f})   split / this {ratio:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["128x64", "512x256", "1024x512"], help="d x rows")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--port", type=int, default=29555)
    options = parser.parse_args()
    sizes = [tuple(map(int, size.split("x"))) for size in options.sizes]
    print(heading(), flush=True)
    mp.spawn(work, (options.port, sizes, options.turns), _RANKS)


if __name__ == "__main__":
    main()
