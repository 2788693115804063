"""Step time of layers that are split over two ranks, against DTensor, FairScale, no communication, and one process.

    python -m benchmarks.tensor_split [--sizes 128x64 512x256 1024x512] [--gpt 256x4x64 768x4x128] [--turns 9]

Two models: 4 x Linear(d, 4 d) - GELU - Linear(4 d, d), where a size is d and the rows of a batch; and 4 blocks of GPT-2
(norm, attention with 8 heads, norm, feed-forward of 4 d), where a size is d, samples and tokens of a sample. A step is
forward, backward and SGD, with one intra-op thread a rank. "without communication" has layers of the parts' sizes.
The ways take turns; the one process computes while the other rank waits. What a rank holds is counted with AdamW, in
bytes of parameters and states; --turns 0 prints this alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from benchmarks.heading import heading
from lightning_multigpu.communication.metering.clocks import synchronise
from lightning_multigpu.engine.tensor_split.blocks import find_blocks
from lightning_multigpu.engine.tensor_split.layers import ColumnSplitLinear, RowSplitLinear
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from lightning_multigpu.engine.tensor_split.trials import TracelessStep, Trials

_RANKS = 2
_BLOCKS = 4
_HEADS = 8
_TURN_S = 0.5


def chain(first: Callable[[], nn.Module], second: Callable[[], nn.Module]) -> nn.Sequential:
    """Blocks of two layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(_BLOCKS) for layer in (first(), nn.GELU(), second())))


class GPTBlock(nn.Module):
    """A block of GPT-2, with queries, keys and values apart so that DTensor's styles can split them.

    Args:
        width: of the activations, (samples, tokens, width).
        parts: the block has this part of the heads and of the hidden features.
    """

    def __init__(self, width: int, parts: int = 1) -> None:
        super().__init__()
        self.n_head, self.head_width = _HEADS // parts, width // _HEADS
        inner, hidden = width // parts, 4 * width // parts
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.keys, self.values = (nn.Linear(width, inner) for _ in range(3))
        self.output = nn.Linear(inner, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        heads = [layer(y) for layer in (self.queries, self.keys, self.values)]
        q, k, v = (each.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for each in heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.output(attended)
        return x + self.down(F.gelu(self.up(self.second_norm(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Blocks of GPT-2, with the size of each as of :class:`GPTBlock`."""

    def __init__(self, width: int, parts: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(GPTBlock(width, parts) for _ in range(_BLOCKS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)  # type: ignore[no-any-return]


def split_gpt(width: int, group: TensorGroup, x: Tensor) -> nn.Module:
    """Blocks that are found, tried and split as the strategy does it."""
    model = GPT(width).to(x.device)

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * _RANKS
        dist.all_gather_object(values, value)
        return values

    @contextmanager
    def traceless() -> Iterator[None]:
        yield
        model.train()

    run = TracelessStep(model, group, lambda: model(x).square().mean(), traceless=traceless, gather=gather)
    trials = Trials(run)
    trials.run(lambda called: find_blocks(model, called))
    if len(trials.split) != 2 * _BLOCKS:
        raise RuntimeError(f"{len(trials.split)} of {2 * _BLOCKS} blocks are split")
    return model


def gpt_models(width: int, group: TensorGroup, x: Tensor) -> dict[str, Callable[[], nn.Module]]:
    """What makes the same blocks of GPT-2 in each way."""
    column, row = ("queries", "keys", "values", "up"), ("output", "down")
    plan = {f"blocks.*.{layer}": ColwiseParallel() if layer in column else RowwiseParallel() for layer in column + row}
    return {
        "split": lambda: split_gpt(width, group, x),
        "DTensor": lambda: parallelize_module(GPT(width).to(x.device), _mesh(group, x.device), plan),
        "without communication": lambda: GPT(width, _RANKS),
        "one process": lambda: GPT(width),
    }


def models(width: int, group: TensorGroup, x: Tensor) -> dict[str, Callable[[], nn.Module]]:
    """What makes the same pairs of layers in each way."""
    hidden, part = 4 * width, 4 * width // _RANKS

    def whole() -> nn.Sequential:
        return chain(lambda: nn.Linear(width, hidden), lambda: nn.Linear(hidden, width))

    plan = {str(3 * block + layer): (ColwiseParallel(), RowwiseParallel())[layer // 2]
            for block in range(_BLOCKS) for layer in (0, 2)}  # fmt: skip
    return {
        "split": lambda: chain(
            lambda: ColumnSplitLinear.of(nn.Linear(width, hidden), group),
            lambda: RowSplitLinear.of(nn.Linear(hidden, width), group),
        ),
        "DTensor": lambda: parallelize_module(whole().to(x.device), _mesh(group, x.device), plan),
        "FairScale": lambda: _fairscale(width, hidden),
        "without communication": lambda: chain(lambda: nn.Linear(width, part), lambda: nn.Linear(part, width)),
        "one process": whole,
    }


def _mesh(group: TensorGroup, device: torch.device) -> DeviceMesh:
    return DeviceMesh.from_group(group.group, device.type)


def _fairscale(width: int, hidden: int) -> nn.Module:
    import fairscale.nn.model_parallel as fairscale  # which an environment may not have

    if not fairscale.initialize.model_parallel_is_initialized():
        fairscale.initialize_model_parallel(_RANKS)
    return chain(
        lambda: fairscale.ColumnParallelLinear(width, hidden, gather_output=False),
        lambda: fairscale.RowParallelLinear(hidden, width, input_is_parallel=True),
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Forward, backward and update, which sees the parts of parameters as under the strategy."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    with torch._C.DisableTorchFunctionSubclass():
        optimizer.step()


def measured(ways: dict[str, nn.Module], x: Tensor, turns: int, turn_s: float = _TURN_S) -> dict[str, list[float]]:
    """Seconds of a step in each way and turn, of about ``turn_s`` seconds; all ranks call it."""
    rank = dist.get_rank()
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=1e-4) for name, model in ways.items()}
    found: dict[str, list[float]] = {name: [] for name in ways}
    steps = 1
    for turn in range(turns + 1):
        for name, seconds in found.items():
            dist.barrier()
            start_s = time.perf_counter()
            if name != "one process" or rank == 0:
                for _ in range(steps):
                    step(ways[name], optimizers[name], x)
            synchronise(x.device)
            dist.barrier()
            if turn:  # the first one warms up
                seconds.append((time.perf_counter() - start_s) / steps)
            elif name == "split":
                counted = torch.tensor([max(1.0, turn_s / (time.perf_counter() - start_s))], device=x.device)
                dist.broadcast(counted, 0)
                steps = min(50, int(counted))
    return found


def work(rank: int, port: int, sizes: Sequence[tuple[int, ...]], gpt: Sequence[tuple[int, ...]], turns: int) -> None:
    """Times all ways on one rank; the first one prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=_RANKS)
    group = TensorGroup(dist.group.WORLD)
    for width, *shape in (*sizes, *gpt):
        x = torch.randn(*shape, width, generator=torch.Generator().manual_seed(1))
        makers = (models if len(shape) == 1 else gpt_models)(width, group, x)
        ways = {name: make() for name, make in makers.items()}
        found = measured(ways, x, turns)
        if rank == 0:
            kind = f"{shape[0]} rows" if len(shape) == 1 else f"GPT-2 blocks, {shape[0]} x {shape[1]} tokens"
            _print(f"d={width}, {kind}", found, ways)
    group.close()
    dist.destroy_process_group()


def held_bytes(model: nn.Module) -> int:
    """Bytes of the parameters, and of the states that a step of AdamW makes."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(tensor.nbytes for tensor in [*model.parameters(), *states])


def _print(title: str, found: dict[str, list[float]], ways: dict[str, nn.Module]) -> None:
    share = held_bytes(ways["split"]) / held_bytes(ways["one process"])
    print(f"{title}; {share:.3f} of the parameters and states of AdamW on each rank", flush=True)
    for name, seconds in found.items():
        if not seconds:
            continue
        ratio = statistics.median(ours / other for ours, other in zip(found["split"], seconds, strict=True))
        low, middle, high = (1e3 * value for value in statistics.quantiles(seconds, n=4))
        print(f"  {name:24} {middle:9.2f} ms  ({low:.2f} - {high:.2f})   split / this {ratio:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=["128x64", "512x256", "1024x512"], help="d x rows")
    parser.add_argument("--gpt", nargs="*", default=["256x4x64", "768x4x128"], help="d x samples x tokens")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--port", type=int, default=29555)
    options = parser.parse_args()
    sizes, gpt = ([tuple(map(int, size.split("x"))) for size in given] for given in (options.sizes, options.gpt))
    print(heading(), flush=True)
    mp.spawn(work, (options.port, sizes, gpt, options.turns), _RANKS)


if __name__ == "__main__":
    main()
