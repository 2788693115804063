"""Calibration: measures this machine, or the hosts of a job, and makes the machine that plans are for.

::

    kernels       products, memory, compression         1, 2 .. N ranks at once
    collectives   all_reduce, send_recv by size         fitted: latency, bandwidth, bend
    references    a tiny, a deep and a large model      what a step takes beyond its formula: a fixed time, a time for
                  under each strategy, in turn          each tensor, how much longer transfers take or how few hide
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch

from lightning_multigpu.bench import kernels
from lightning_multigpu.bench.collectives import collective_run
from lightning_multigpu.bench.collectives.collective_run import CollectivePlan
from lightning_multigpu.bench.collectives.implementations import IMPLEMENTATIONS, OWNERS
from lightning_multigpu.bench.collectives.operations import BY_NAME
from lightning_multigpu.bench.jobs.host_agents import HostAgents
from lightning_multigpu.bench.strategies import strategy_rank
from lightning_multigpu.bench.strategies.contenders import NO_COMMUNICATION, Contender, contender
from lightning_multigpu.bench.strategies.models import BenchMLP, Subject
from lightning_multigpu.bench.strategies.strategy_rank import StrategyPlan
from lightning_multigpu.bench.strategies.strategy_run import StrategyResult, StrategyRun, take_turns
from lightning_multigpu.callbacks.other_processes import Usage, share_of_others, usage
from lightning_multigpu.planning.pipelines.schedule_order import schedule_orders, step_time
from lightning_multigpu.planning.pipelines.timeline import HeldBytes
from lightning_multigpu.planning.scaling.links import fitted
from lightning_multigpu.planning.scaling.machine_model import (
    FROM_OWNERS,
    OF_ACTIVATIONS,
    QUIET,
    TO_OWNER,
    Coding,
    Machine,
    MeasuredCollective,
    ReferenceCost,
    World,
)
from lightning_multigpu.planning.scaling.model_profile import ModelProfile, Phases
from lightning_multigpu.planning.scaling.step_model import (
    Candidate,
    Prediction,
    compressed_name,
    default_bucket_bytes,
    messages_of,
    predict,
)

RANK_MODULES = (collective_run.__name__, strategy_rank.__name__)
"""What the ranks of a calibration import; kernels come first, and do not need them."""
SIZES = (4 << 10, 64 << 10, 512 << 10, 2 << 20, 8 << 20, 32 << 20)
_SOME_BYTES, _SLOW_BYTES_PER_S = 8e6, 4e8
_LONGEST_CALL_S = 0.5
_ON_ONE_HOST = ("cpu_ps", "dp")
_DATA_PARALLEL = ("ring_ddp", "ddp_sharded", "sync_ps", "sharded_ps")
_SMALL_BUCKET_MB = 0.01
SMALL_BUCKETS = {name: f"{name}:bucket_cap_mb={_SMALL_BUCKET_MB}" for name in ("ring_ddp", "ddp_sharded")}
"""Each layer of the deep model is a bucket, or a message to its owner."""
_MOST_SAMPLES, _MOST_ON_CPU = 1024, 256
_TURNS = 8
_REPETITIONS = 3
_TINY_WIDTH, _TINY_BATCH, _LARGE_BATCH = 64, 16, 64
_TINY_LAYERS, _DEEP_LAYERS, _LARGE_LAYERS = 6, 30, 6
_MICRO_BATCHES = (4, 16)
PIPELINES = [f"pipeline_1f1b:num_micro_batches={number}" for number in _MICRO_BATCHES]
_FORWARD_SHARE, _BACKWARD_SHARE, _OPTIMIZER_SHARE = 0.35, 0.6, 0.05
"""Of a step of the reference model."""
_TIMEOUT_S = 120.0
_ATTEMPTS = 3


def calibrated(
    hosts: HostAgents, device_type: str, base: Machine, tell: Callable[[str], object] = lambda what: None
) -> Machine:
    """The machine ``base``, whose measurements of other worlds stay, with those of the hosts' world.

    A collective of all agents; ``tell`` is told what is measured next. What other processes disturb is measured up to
    three times, and the least disturbed measurement counts.
    """
    placement = hosts.placement
    world = World(placement.num_nodes, placement.devices)
    gpus = range(placement.devices if device_type == "cuda" else 0)
    machine, most = base, 0.0
    for name, measure in (
        ("kernels", with_kernels),
        ("collectives", with_collectives),
        ("reference steps", with_references),
    ):
        tried: list[tuple[float, Machine]] = []
        while len(tried) < _ATTEMPTS and (not tried or min(tried, key=_share)[0] > QUIET):
            tell(f"{name}, again: other processes are busy" if tried else name)
            before = hosts.share(usage(gpus))
            found = measure(hosts, device_type, machine, world)
            after = hosts.share(usage())
            readings = ([Usage(*each) for each in several] for several in (before, after))
            tried.append((share_of_others(*readings), found))
        share, machine = min(tried, key=_share)
        most = max(most, share)
    return replace(machine, disturbed={**base.disturbed, str(world): most})


def _share(tried: tuple[float, Machine]) -> float:
    return tried[0]


def with_kernels(hosts: HostAgents, device_type: str, base: Machine, world: World) -> Machine:
    """The machine with what its kernels take, alone and beside those of other ranks."""
    nodes, most = world.nodes, min(world.devices, base.devices)  # where ranks share cores, plans know nothing
    crowds = sorted({1, *(2**i for i in range(1, 10) if 2**i < most), most})
    seconds: dict[int, dict[str, float]] = {}
    boots: list[str] = []
    job = hosts.start(kernels.serve, device_type, timeout_s=_TIMEOUT_S)
    for crowd in crowds:
        answers = job.turn(crowd)
        boots = [answer["boot"] for answer in answers]
        of_ranks = [answer["seconds"] for answer in answers if answer["seconds"]]
        seconds[crowd] = {name: max(each[name] for each in of_ranks) for name in of_ranks[0]}
    job.end()
    shares = nodes > 1 and len(set(boots)) == 1 and bool(boots[0])
    alone = seconds[1]
    sizes = [int(name.split()[1]) for name in alone if name.startswith("matmul")]
    best = max(kernels.flops(size) / alone[f"matmul {size}"] for size in sizes)
    mixed = [f"matmul {kernels.MATMUL_SIZES[-1]}", "stream"]
    slowdown = {c: sum(s[name] / alone[name] for name in mixed) / len(mixed) for c, s in seconds.items()}
    coded = seconds[most]
    codings = [
        Coding(name=name, ratio=coded[f"ratio {name}"], s_per_byte=coded[f"coding {name}"] / kernels.CODED_BYTES)
        for name in kernels.CODINGS
    ]
    if shares:
        return replace(base, shares_cores=True, codings=base.codings or codings)
    return replace(
        base,
        codings=codings,
        flops_per_s={"float32": best},
        memory_bytes_per_s=kernels.STREAM_BYTES / alone["stream"],
        slowdown={**base.slowdown, **(slowdown if device_type == "cpu" else {})},
    )


def with_collectives(hosts: HostAgents, device_type: str, machine: Machine, world: World) -> Machine:
    """The machine with the links that explain the collectives of a world."""
    if world.size == 1:
        return machine
    found = []
    for operation, (name, called) in _implementations(device_type, world).items():
        points: list[tuple[int, float]] = []
        for sizes in (SIZES[:4], *([size] for size in SIZES[4:])):  # larger ones only where they do not take too long
            if points and sizes[-1] / points[-1][0] * points[-1][1] > _LONGEST_CALL_S:
                break
            plan = CollectivePlan(
                operations=[BY_NAME[called]],
                implementations=[each for each in (*IMPLEMENTATIONS, OWNERS) if each.name == name],
                sizes=sizes,
                device_type=device_type,
                dtype=torch.float32,
                repetitions=5,
                warm_up=1,
                timeout_s=_TIMEOUT_S,
            )
            rows = collective_run.measure(hosts, plan)
            points += [(row.size_bytes, row.seconds.median) for row in rows if row.seconds is not None]
        if len(points) > 1:
            found.append(MeasuredCollective(operation=operation, world=world, link=fitted(points)))
    others = [each for each in machine.collectives if each.world != world]
    machine = replace(machine, collectives=[*others, *found])
    link = next((each.link for each in found if each.operation == "send_recv"), None)
    if link is None:
        return machine
    return replace(machine, inside=link) if world.nodes == 1 else replace(machine, between=link)


def _implementations(device_type: str, world: World) -> dict[str, tuple[str, str]]:
    """The operations to measure -> the implementation of the bench, and its operation."""
    if device_type == "cuda":
        return {"all_reduce": ("nccl", "all_reduce"), "send_recv": ("nccl", "send_recv")}
    names = {
        "all_reduce": ("shared_memory" if world.nodes == 1 else "hierarchy", "all_reduce"),
        "send_recv": ("gloo", "send_recv"),
        TO_OWNER: ("gloo", "reduce"),
        FROM_OWNERS: ("owners", "all_gather"),
    }
    return names if world.nodes == 1 else {**names, OF_ACTIVATIONS: ("gloo", "all_reduce")}


def with_references(hosts: HostAgents, device_type: str, machine: Machine, world: World) -> Machine:
    """The machine with the costs that explain the steps of the reference models in a world."""
    if not 1 < world.size <= machine.cores(world):  # where ranks share cores, plans know nothing
        return machine
    bytes_per_s = _SOME_BYTES / machine.all_reduce_s(world, _SOME_BYTES)
    width = 1024 if bytes_per_s > _SLOW_BYTES_PER_S else 512
    batch_size = large_batch(machine, world, width)
    large = Subject("large", partial(BenchMLP, width=width, num_layers=_LARGE_LAYERS), batch_size)
    tiny, deep = (
        Subject(name, partial(BenchMLP, width=_TINY_WIDTH, num_layers=layers), _TINY_BATCH)
        for name, layers in (("tiny", _TINY_LAYERS), ("deep", _DEEP_LAYERS))
    )
    names = [name for name in (*_DATA_PARALLEL, *_ON_ONE_HOST) if world.nodes == 1 or name not in _ON_ONE_HOST]
    every = [Contender(NO_COMMUNICATION), *map(contender, names)]
    pipelines = [*map(contender, PIPELINES)]
    split = contender("tensor_split")
    coded = [contender(compressed_name("ring_ddp", each.name)) for each in machine.codings if world.nodes > 1]
    groups = [
        [(large, each) for each in (*every, *coded, split)],
        [(tiny, each) for each in every],
        [(deep, each) for each in (*every, *map(contender, SMALL_BUCKETS.values()))],
        [*((tiny, each) for each in (*pipelines, split)), *((deep, each) for each in (pipelines[0], split))],
    ]
    rows: dict[tuple[str, str], StrategyResult] = {}
    for wanted in groups:  # ranks that wait for their turn take time of the cores, too
        runs = []
        for subject, each in wanted:
            plan = StrategyPlan(
                subject=subject, device_type=device_type, repetitions=_REPETITIONS,
                steps=4 if subject is large else 15, warm_up=1, timeout_s=_TIMEOUT_S,
            )  # fmt: skip
            runs.append(StrategyRun(hosts, each, plan))
        rows |= {(s.name, c.label): row for (s, c), row in zip(wanted, take_turns(runs), strict=True)}
    return Fit(machine, world, rows, width, batch_size, names).machine()


def large_batch(machine: Machine, world: World, width: int) -> int:
    """Samples whose computation takes about as long as the transfers, so that what hides can be seen.

    On CPUs at most 256: a larger batch keeps the cores busy, and transfers beside it take longer than usual.
    """
    parameters = 6 * width**2
    transfers_s = machine.all_reduce_s(world, 4.0 * parameters)
    flops_per_s = machine.flops_per_s.get("float32", 1e11) / machine.slowdown_of(machine.crowd(world))
    samples = transfers_s * flops_per_s / (6 * parameters)
    most = _MOST_SAMPLES if machine.device_type == "cuda" else _MOST_ON_CPU
    return min(most, max(_LARGE_BATCH, round(samples / _LARGE_BATCH) * _LARGE_BATCH))


class Fit:
    """The costs of a world, from the rows of its reference steps."""

    def __init__(
        self,
        machine: Machine,
        world: World,
        rows: dict[tuple[str, str], StrategyResult],
        width: int,
        batch_size: int,
        names: Sequence[str],
    ) -> None:
        self._machine, self._world, self._rows, self._names = machine, world, rows, names
        self._activation_bytes = {"tiny": 4 * _TINY_BATCH * _TINY_WIDTH, "large": 4 * batch_size * width}
        large = self._step("large", NO_COMMUNICATION)
        assert large is not None
        slowdown = machine.slowdown_of(machine.crowd(world))
        self._profile = reference_profile(width, _LARGE_LAYERS, large / slowdown)
        self._small = {
            name: reference_profile(_TINY_WIDTH, layers, (self._step(name, NO_COMMUNICATION) or 0.0) / slowdown)
            for name, layers in (("tiny", _TINY_LAYERS), ("deep", _DEEP_LAYERS))
        }
        self._costs: list[ReferenceCost] = []

    def _step(self, subject: str, label: str) -> float | None:
        row = self._rows.get((subject, label))
        return None if row is None or row.step_s is None else fmean(row.rank_medians_s)

    def machine(self) -> Machine:
        for name in self._names:
            if all(self._step(subject, name) is not None for subject in ("tiny", "deep", "large")):
                self._costs.append(self._cost(name))
        self._compressed()
        self._pipeline()
        self._tensor_split()
        others = [each for each in self._machine.references if each.world != self._world]
        return replace(self._machine, references=[*others, *self._costs])

    def _predicted(self, model: ModelProfile, cost: ReferenceCost, **options: Any) -> Prediction:
        machine = replace(self._machine, references=[cost])
        name, _, compression = cost.strategy.partition(":compression=")
        options |= {"compression": compression} if compression else {}
        return predict(model, machine, Candidate(name, options), self._world)

    def _predicted_s(self, cost: ReferenceCost) -> float:
        return self._predicted(self._profile, cost).step_s

    def _cost(self, name: str) -> ReferenceCost:
        """The costs that explain the steps of all reference models, found in turn until they agree.

        Between hosts and on accelerators ``busy`` explains what does not hide; on one host ``scale`` explains all.
        """
        on_cores = self._machine.device_type == "cpu" and self._world.nodes == 1
        cost, large_s = ReferenceCost(strategy=name, world=self._world, busy=float(on_cores)), self._step("large", name)
        assert large_s is not None
        for _ in range(_TURNS):
            cost = self._with_small_models(cost)
            cost = self._solved(cost, "scale", 20.0, large_s) if on_cores else self._hidden(cost, large_s)
        return cost

    def _hidden(self, cost: ReferenceCost, large_s: float) -> ReferenceCost:
        """The cost with the share of transfers that hides.

        Where a step is shorter than if all hid, transfers are faster than alone; where it is longer than if none did,
        they slow computation down.
        """
        cost = self._solved(replace(cost, scale=1.0, slowing=0.0), "busy", 1.0, large_s)
        if cost.busy in (0.0, 1.0):
            return self._solved(cost, "slowing" if cost.busy else "scale", 20.0, large_s)
        return cost

    def _compressed(self) -> None:
        """Encoding and decoding take the cores that backward needs, so that less hides than of plain transfers."""
        plain = next((each for each in self._costs if each.strategy == "ring_ddp"), None)
        for coding in self._machine.codings:
            name = compressed_name("ring_ddp", coding.name)
            step_s = self._step("large", name)
            if plain is not None and step_s is not None:
                self._costs.append(self._hidden(replace(plain, strategy=name), step_s))

    def _with_small_models(self, cost: ReferenceCost) -> ReferenceCost:
        """The costs of a batch, a tensor and a bucket, beyond the transfers with the scale of ``cost``."""
        extra = [self._beyond(subject, cost) for subject in ("tiny", "deep")]
        few, many = (2 * (layers + 1) for layers in (_TINY_LAYERS, _DEEP_LAYERS))
        tensor_s = max(0.0, (extra[1] - extra[0]) / (many - few))
        cost = replace(cost, fixed_s=max(0.0, extra[0] - few * tensor_s), tensor_s=tensor_s)
        small = SMALL_BUCKETS.get(cost.strategy)
        if small is not None and self._step("deep", small) is not None:
            deep, world = self._small["deep"], self._world
            usual_bytes = default_bucket_bytes(cost.strategy, deep.gradient_bytes, world)
            usual, most = (
                len(messages_of(cost.strategy, deep.gradients, size, world.size))
                for size in (usual_bytes, _SMALL_BUCKET_MB * 2**20)
            )
            more_s = self._beyond("deep", cost, small, bucket_cap_mb=_SMALL_BUCKET_MB) - extra[1]
            cost = replace(cost, bucket_s=more_s / (most - usual))
            cost = replace(cost, fixed_s=max(0.0, cost.fixed_s - usual * cost.bucket_s))
        return cost

    def _beyond(self, subject: str, cost: ReferenceCost, label: str = "", **options: Any) -> float:
        """Seconds that a step of a small model takes beyond that without communication and beyond its transfers."""
        with_s, without_s = self._step(subject, label or cost.strategy), self._step(subject, NO_COMMUNICATION)
        assert with_s is not None
        assert without_s is not None
        transfers = replace(cost, fixed_s=0.0, tensor_s=0.0, bucket_s=0.0, slowing=0.0)
        return with_s - without_s - self._predicted(self._small[subject], transfers, **options).exposed_s

    def _solved(self, cost: ReferenceCost, field: str, most: float, step_s: float) -> ReferenceCost:
        """The cost with the value of ``field`` between 0 and ``most`` whose prediction is ``step_s``."""

        def changed(value: float) -> ReferenceCost:
            return replace(cost, **{field: value})  # type: ignore[arg-type]

        if self._predicted_s(changed(0.0)) >= step_s:
            return changed(0.0)
        return changed(round(bisected(lambda value: self._predicted_s(changed(value)), 0.0, most, step_s), 9))

    def _pipeline(self) -> None:
        """From the time that more micro-batches of the tiny model take, whose passes compute nearly nothing.

        Layers of the deep model, which compute as little, take time for the hooks of their parameters.
        """
        machine, world = self._machine, self._world
        few_s, many_s = (self._step("tiny", label) for label in PIPELINES)
        deep_s = self._step("deep", PIPELINES[0])
        if few_s is None or many_s is None or deep_s is None:
            return
        link = machine.link_inside(world) if world.nodes == 1 else machine.link_between(world)
        few, many = _MICRO_BATCHES
        alone_s = self._step("tiny", NO_COMMUNICATION) or 0.0
        deeper_s = (self._step("deep", NO_COMMUNICATION) or 0.0) - alone_s
        deeper_s *= (few + world.size - 1) / world.size
        tensors, more_tensors = 2 * (_TINY_LAYERS + 1), 2 * (_DEEP_LAYERS - _TINY_LAYERS)
        tensor_s = max(0.0, (deep_s - few_s - deeper_s) / few / more_tensors)
        few_s, many_s = few_s - few * tensors * tensor_s, many_s - many * tensors * tensor_s

        def passes_s(number: int, pass_s: float, scale: float) -> float:
            orders = schedule_orders("1f1b", world.size, 1, number)
            cuts_s = [link.latency_times(scale).seconds(self._activation_bytes["tiny"] / number)] * (world.size - 1)
            return step_time(orders, [pass_s] * world.size, [pass_s] * world.size, cuts_s)

        def more_s(pass_s: float, scale: float) -> float:
            return passes_s(many, pass_s, scale) - passes_s(few, pass_s, scale)

        wanted_s, scale, pass_s = max(0.0, many_s - few_s), 1.0, 0.0
        if more_s(0.0, 1.0) > wanted_s:
            scale = bisected(lambda factor: more_s(0.0, factor), 0.0, 1.0, wanted_s)
        else:
            pass_s = bisected(lambda each_s: more_s(each_s, 1.0), 0.0, 1.0, wanted_s)
        fixed_s = max(0.0, few_s - alone_s - passes_s(few, pass_s, scale))
        self._costs.append(
            ReferenceCost(
                strategy="pipeline_1f1b", world=world, fixed_s=fixed_s, scale=scale, tensor_s=tensor_s, pass_s=pass_s,
            )
        )  # fmt: skip

    def _tensor_split(self) -> None:
        """Each collective costs more or less than alone; n pairs of layers need 2n - 1: the input needs no gradient.

        The difference of the deep and the tiny model gives the seconds of a small collective. Between hosts the large
        model gives those of a large one: a rank computes its part of that model, and what the tiny one takes anyway. On
        one host large collectives are short: a large one takes longer by its bytes alone, and what is left slows
        computation down.
        """
        machine, size = self._machine, self._world.size
        extra: dict[str, float] = {}
        tiny_s = self._step("tiny", NO_COMMUNICATION) or 0.0
        for name in ("tiny", "deep", "large"):
            step_s, alone_s = self._step(name, "tensor_split"), self._step(name, NO_COMMUNICATION)
            if step_s is None or alone_s is None:
                return
            extra[name] = step_s - (tiny_s + (alone_s - tiny_s) / size if name == "large" else alone_s)
        few, many, large = (2 * ((layers + 1) // 2) - 1 for layers in (_TINY_LAYERS, _DEEP_LAYERS, _LARGE_LAYERS))
        small_s = max(0.0, (extra["deep"] - extra["tiny"]) / (many - few))
        fixed_s = max(0.0, extra["tiny"] - few * small_s)
        at_small_s, at_large_s = (
            machine.all_reduce_s(self._world, self._activation_bytes[name], OF_ACTIVATIONS)
            for name in ("tiny", "large")
        )
        scale, slowing = 1.0, 0.0
        if self._world.nodes > 1 and at_large_s > at_small_s:
            large_s = max(small_s, (extra["large"] - fixed_s) / large)
            scale = (large_s - small_s) / (at_large_s - at_small_s)
        else:
            part_s = (1 - _OPTIMIZER_SHARE) * (self._step("large", NO_COMMUNICATION) or 0.0) / size
            left_s = extra["large"] - fixed_s - large * (small_s + max(0.0, at_large_s - at_small_s))
            slowing = max(0.0, left_s / part_s)
        self._costs.append(
            ReferenceCost(
                strategy="tensor_split",
                world=self._world,
                fixed_s=fixed_s,
                scale=scale,
                slowing=slowing,
                pass_s=small_s - scale * at_small_s,
            )
        )


def bisected(value_of: Callable[[float], float], low: float, high: float, wanted: float) -> float:
    """Where the growing function ``value_of`` reaches ``wanted``, or the nearer one of ``low`` and ``high``."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if value_of(middle) < wanted else (low, middle)
    return high


def reference_profile(width: int, num_layers: int, step_s: float) -> ModelProfile:
    """A reference model, and the seconds of its step alone on the machine."""
    model = BenchMLP(width=width, num_layers=num_layers)
    gradients = [parameter.nbytes for parameter in reversed(list(model.parameters()))]
    total = sum(gradients)
    shares, done = [], 0
    for size in gradients:
        done += size
        shares.append((size, done / total))
    phases = Phases(
        forward_s=_FORWARD_SHARE * step_s, backward_s=_BACKWARD_SHARE * step_s, optimizer_s=_OPTIMIZER_SHARE * step_s
    )
    return ModelProfile(
        name="reference",
        samples=_LARGE_BATCH,
        parameters=total // 4,
        held=HeldBytes(total, total, 0),
        activations_bytes=0,
        flops=0.0,
        gradients=shares,
        phases=phases,
    )
