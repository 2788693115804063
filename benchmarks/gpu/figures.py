"""Figures of a card: times of this pack beside those of a peer, measured in turns in one run, nothing else running.

Ranks that share a card share its time: a step of two ranks has the compute of both. A ratio to a peer that shares it as
well says what this pack costs; a time says nothing about ranks with a GPU each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import compression, pipeline_step, tensor_split
from benchmarks.compared import columns, compared, median_ms
from benchmarks.gpu.card import Card
from benchmarks.gpu.table import Check, NotPossibleError, Place
from benchmarks.host_time import SmallLayers
from lightning_multigpu.bench.jobs.host_agents import HostAgents
from lightning_multigpu.bench.jobs.placement import placement
from lightning_multigpu.bench.strategies.contenders import contender
from lightning_multigpu.bench.strategies.models import BenchGPT, Subject
from lightning_multigpu.bench.strategies.strategy_rank import StrategyPlan
from lightning_multigpu.bench.strategies.strategy_run import StrategyResult, StrategyRun, take_turns
from lightning_multigpu.communication.compression import make_compressor
from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce
from lightning_multigpu.communication.metering.clocks import synchronise
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.shared_memory.host_all_reduce import SharedMemoryAllReduce
from lightning_multigpu.engine.data_parallel.reducer import GradientReducer
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from lightning_multigpu.planning.numbers import size as size_of
from lightning_multigpu.strategies.pipeline.strategy import PipelineStrategy
from tests.world import init_group, rank, world_size

ROW = "figure"
_DEADLINE_S, _DEADLINE_ON_CPUS_S = 40.0, 150.0
_DDP, _RING = "ddp", "ring_ddp"
_ROUNDS = {4 << 10: 30, 1 << 20: 20, 16 << 20: 8, 64 << 20: 5}  # bytes: all-reduces in each way
_CODED_ELEMENTS = 25_000_000 // 4096 * 1024
_CODINGS = ("bf16", "int8")
_MICRO_BATCHES = 4


def ring_over_ddp(place: Place, *, model: type[SmallLayers | BenchGPT]) -> str:
    """A training step of both strategies on one rank and on two, in turns; the goal is a ratio of 1."""
    plan, contenders = _plan(place.card, model), [contender(text) for text in (_DDP, _RING)]
    with HostAgents(placement(2, environment={}), threads=1) as hosts:
        runs = [StrategyRun(hosts, each, plan, devices) for devices in (1, 2) for each in contenders]
        results = take_turns(runs)
    lines = [
        f"{model.__name__}, batch {plan.subject.batch_size} a rank, {plan.repetitions} turns of {plan.steps} steps",
        columns(_RING, _DDP),
    ]
    for name, pair in {"one rank": results[:2], "two ranks": results[2:]}.items():
        if all(result.seconds for result in pair):
            peer, ours = (_turns(result, plan.steps) for result in pair)
            lines.append(compared(name, ours, peer, digits=2))
    failed = [f"{result.label}: {result.reason}" for result in results if result.reason is not None]
    assert not failed, "\n".join([*failed, *lines])  # the other contenders have their lines
    return _table(lines)


def _plan(card: Card, model: type[SmallLayers | BenchGPT]) -> StrategyPlan:
    return StrategyPlan(
        subject=Subject(model.__name__, model, model.default_batch_size),
        device_type=card.kind,
        repetitions=12 if card.is_gpu else 6,
        steps=10 if card.is_gpu else 3,
        warm_up=2 if card.is_gpu else 1,
        timeout_s=10.0 if card.is_gpu else 30.0,
        start_timeout_s=20.0 if card.is_gpu else 60.0,
    )


def _turns(result: StrategyResult, steps: int) -> list[float]:
    """The median step of each turn."""
    return [statistics.median(result.seconds[a : a + steps]) for a in range(0, len(result.seconds), steps)]


def all_reduce(place: Place, *, over_nccl: bool) -> str:
    """What the meter says of all-reduces of float32 between two ranks of a card."""
    if over_nccl and not (place.card.is_gpu and place.card.backend_of(2) == "nccl"):
        raise NotPossibleError("NCCL does not share a GPU here, or there is none")
    ranks = place.run(2, all_reduce_seconds, place.card, over_nccl)
    lines = [f"{'size':8} {'':24} {'':28} {'algbw (GB/s)':>12}  ratio to Gloo"]
    for size in _ROUNDS:
        found = {way: _slowest([each[size][way] for each in ranks]) for way in ranks[0][size]}
        base = statistics.median(found["torch over Gloo"])
        for way, seconds in found.items():
            middle = statistics.median(seconds)
            figures = f"{median_ms(seconds, 2):28} {size / middle / 1e9:12.3f}  {middle / base:.3f}"
            lines.append(f"{size_of(size):8} {way:24} {figures}")
    return _table(lines)


def all_reduce_seconds(card: Card, over_nccl: bool) -> dict[int, dict[str, list[float]]]:
    """This rank's seconds by size and way, from its start to the end of the copy to the device."""
    init_group()
    device = card.device(rank())
    with ExitStack() as stack:
        ways = _ways(device if over_nccl else None, stack)
        return {size: _metered(ways, torch.empty(size // 4, device=device), rounds) for size, rounds in _ROUNDS.items()}


def _ways(nccl_device: torch.device | None, stack: ExitStack) -> dict[str, Callable[[Tensor], object]]:
    """All-reduces through the host's memory and, if a device is given, through NCCL."""
    gloo, own = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    shared = GradientReducer(own, Meter(), all_reduce=HierarchicalAllReduce(SharedMemoryAllReduce(own), None))
    stack.callback(shared.close)
    ways: dict[str, Callable[[Tensor], object]] = {
        "torch over Gloo": partial(dist.all_reduce, group=gloo),
        "ring_ddp, shared memory": shared.average,
    }
    if nccl_device is not None:
        nccl = dist.new_group(backend="nccl", device_id=nccl_device)
        ways["torch over NCCL"] = partial(dist.all_reduce, group=nccl)
        ways["ring_ddp over NCCL"] = GradientReducer(nccl, Meter()).average
    return ways


def _metered(ways: Mapping[str, Callable[[Tensor], object]], tensor: Tensor, rounds: int) -> dict[str, list[float]]:
    meters = {name: Meter() for name in ways}
    described = {"group": "data", "group_size": world_size(), "size_bytes": tensor.nbytes, "on_stream": tensor.is_cuda}
    for turn in range(rounds + 1):
        for name, all_reduce in ways.items():
            tensor.fill_(rank() + 1.0)
            synchronise(tensor.device)
            dist.barrier()
            with meters[name].blocking("all_reduce", **described):
                all_reduce(tensor)
            meters[name].end_step()
            if turn == 0:
                assert float(tensor[0]) in (1.5, 3.0), f"{name}: {float(tensor[0])} is no mean or sum of 1 and 2"
                assert bool((tensor == tensor[0]).all()), f"{name}: elements differ"
    return {name: _seconds_of(meter) for name, meter in meters.items()}


def _seconds_of(meter: Meter) -> list[float]:
    """Of each all-reduce but the first."""
    meter.flush()
    return [step.total_s for step in meter.steps][1:]


def coding(place: Place) -> str:
    """What it takes to encode and decode 25 MB of gradients, on the card and on one core of the host."""
    (found,) = place.run(1, coding_seconds, place.card, 20 if place.card.is_gpu else 7)
    lines = ["encode and decode 25 MB of float32, error feedback included"]
    if place.card.is_gpu:
        lines.append(columns("on the card", "on one core"))
        return _table(lines + [compared(name, *times[::-1], digits=2) for name, times in found.items()])
    return _table(lines + [f"{name:18} {median_ms(times[0], 2)} on one core" for name, times in found.items()])


def coding_seconds(card: Card, rounds: int) -> dict[str, list[list[float]]]:
    """Seconds on one core and, where there is one, on the card, by setting; after one turn that warms up."""
    devices = [torch.device("cpu"), *([card.device()] if card.is_gpu else [])]
    found: dict[str, list[list[float]]] = {}
    for name in _CODINGS:
        compressor = make_compressor(name)
        coders = [compression.coders(compressor, _CODED_ELEMENTS, device) for device in devices]
        turns = [
            [
                _timed(lambda coder=coder: [run() for run in coder], device)
                for coder, device in zip(coders, devices, strict=True)
            ]
            for _ in range(rounds + 1)
        ]
        found[name] = [list(times) for times in zip(*turns[1:], strict=True)]
    return found


def pipeline(place: Place) -> str:
    """A step of ``pipeline_1f1b`` against torch's schedule in a loop by hand, of the GPT of the benches."""
    if place.card.is_gpu and place.card.backend_of(2) != "nccl":
        raise NotPossibleError(
            "torch's pipeline stages send CUDA tensors over NCCL only, and it does not share a GPU here"
        )
    batch_size, width, turns = (32, 256, 40) if place.card.is_gpu else (8, 128, 16)
    ranks = place.run(2, pipeline_seconds, place.card, batch_size=batch_size, width=width, turns=turns)
    lines = [
        f"GPT of width {width}, batch {batch_size}, {_MICRO_BATCHES} micro-batches",
        columns("pipeline_1f1b", "by hand"),
    ]
    return _table([*lines, compared("two stages", *pipeline_step.on_slowest_rank(ranks), digits=2)])


def pipeline_seconds(card: Card, **sizes: int) -> tuple[list[float], list[float]]:
    strategy = PipelineStrategy(schedule="1f1b", num_micro_batches=_MICRO_BATCHES)
    options = card.place(strategy, world_size())
    return pipeline_step.turns_of("1f1b", _MICRO_BATCHES, options, device=card.device(rank()), **sizes)


def split_layers(place: Place) -> str:
    """A step of layers that ``tensor_split`` splits, against a plan of DTensor for the same layers."""
    shapes = [(1024, 512), (768, 4, 128)] if place.card.is_gpu else [(128, 64), (256, 4, 64)]
    lines = [columns("split", "DTensor")]
    for shape in shapes:
        ranks = place.run(2, split_seconds, place.card, shape, 9)
        kind = "pairs" if len(shape) == 2 else "GPT-2"
        ours, peer = (_slowest([each[way] for each in ranks]) for way in ("split", "DTensor"))
        lines.append(compared(f"{kind} {'x'.join(map(str, shape))}", ours, peer, digits=2))
    return _table(lines)


def split_seconds(card: Card, shape: Sequence[int], turns: int) -> dict[str, list[float]]:
    """Seconds of a step in both ways, turn by turn."""
    device, backend = card.device(rank()), card.backend_of(world_size())
    bound: dict[str, Any] = {"device_id": device} if backend == "nccl" else {}
    dist.init_process_group(
        backend, rank=rank(), world_size=world_size(), timeout=timedelta(seconds=_DEADLINE_S), **bound
    )
    assert dist.group.WORLD is not None
    group = TensorGroup(dist.group.WORLD)
    width, *rows = shape
    x = torch.randn(*rows, width, generator=torch.Generator().manual_seed(1)).to(device)
    makers = (tensor_split.models if len(rows) == 1 else tensor_split.gpt_models)(width, group, x)
    try:
        ways = {name: makers[name]().to(device) for name in ("split", "DTensor")}
        return tensor_split.measured(ways, x, turns, turn_s=0.2)
    finally:
        group.close()


def _slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    return [max(turn) for turn in zip(*ranks, strict=True)]


def _table(lines: Sequence[str]) -> str:
    return "\n" + "\n".join(f"    {line}" for line in lines)


def figures(card: Card) -> list[Check]:
    """All of them, to be run one at a time."""
    deadline_s = _DEADLINE_S if card.is_gpu else _DEADLINE_ON_CPUS_S
    functions: dict[str, tuple[Callable[[Place], str], int]] = {
        "ring_ddp over ddp, small parameters": (partial(ring_over_ddp, model=SmallLayers), 0),
        "ring_ddp over ddp, GPT": (partial(ring_over_ddp, model=BenchGPT), 0),
        "all-reduce through the host": (partial(all_reduce, over_nccl=False), 2),
        "all-reduce through NCCL": (partial(all_reduce, over_nccl=True), 2),
        "coding of gradients": (coding, 1),
        "pipeline_1f1b over torch by hand": (pipeline, 2),
        "tensor_split over DTensor": (split_layers, 2),
    }
    return [
        Check(row=ROW, column=column, function=function, ranks=ranks, deadline_s=deadline_s)
        for column, (function, ranks) in functions.items()
    ]


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that ``work`` takes until its results are in the device's memory."""
    synchronise(device)
    start_s = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - start_s
