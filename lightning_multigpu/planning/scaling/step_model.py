"""The step model: a training step of each strategy, from a profile of the model and the machine.

Every step is the same sum::

    input + forward + backward + exposed transfers + bubble + optimizer + other + what the calibration found

Rows say which transfers a strategy has: for each bucket of gradients while backward runs, and after it. On accelerators
a transfer hides behind what is left of backward; on CPUs the cores that compute move the bytes, too, and nothing hides.
Buckets fill in the order in which gradients become ready, as in Li et al. 2020, "PyTorch Distributed", section 3.2.
Pipelines follow the orders of :mod:`..pipelines.schedule_order`. What no formula has is counted: batches, tensors,
passes and transfers, each of which :class:`.ReferenceCost` gives seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import hypot
from typing import Any, NamedTuple

from lightning_multigpu.planning.numbers import usual_bucket_bytes
from lightning_multigpu.planning.pipelines.schedule_order import (
    LOOPED_SCHEDULES,
    ScheduleName,
    schedule_orders,
    step_time,
)
from lightning_multigpu.planning.pipelines.timeline import NOTHING, HeldBytes
from lightning_multigpu.planning.scaling.machine import Machine, World, servers_s
from lightning_multigpu.planning.scaling.model_profile import ModelProfile, Phases

_UNCERTAINTY = 0.15
"""The uncertainty of a prediction where nothing varied: 8 of 10 errors of ``benchmarks.planner`` are smaller."""
RATIOS = {"bf16": 2.0, "int8": 3.98}
"""Bytes of a gradient over those that are sent of it, by compression."""
_RING, _HALF, _SERVERS, _COPIES = "all_reduce", "half of it", "to servers and back", "to one device and back"


class Row(NamedTuple):
    """A data-parallel strategy: operations on each bucket and after backward, and what a rank does not do or hold.

    Attributes:
        bucket_bytes: of a bucket on one host and on several; 0 for the ring's usual ones.
        updaters: how many divide the optimizer's work: "ranks", "servers" or "".
        is_one_host: whether it works on one host only.
    """

    during: str = ""
    after: str = ""
    bucket_bytes: tuple[int, int] = (0, 0)
    updaters: str = ""
    is_one_host: bool = False


ROWS = {
    "one_device": Row(),
    "dp": Row(after=_COPIES, is_one_host=True),
    "ring_ddp": Row(_RING),
    "ft_ddp": Row(after=_RING),
    "ddp_sharded": Row(_HALF, _HALF, (1 << 20, 1 << 20), "ranks"),
    "cpu_ps": Row(_HALF, _HALF, updaters="ranks", is_one_host=True),
    "sync_ps": Row(_SERVERS, _SERVERS, (4 << 20, 1 << 20)),
    "async_ps": Row(_SERVERS, _SERVERS, (4 << 20, 1 << 20)),
    "sharded_ps": Row(_SERVERS, _SERVERS, (4 << 20, 1 << 20), "servers"),
}
PIPELINES: dict[str, ScheduleName] = {
    "model_parallel": "gpipe",
    "gpipe": "gpipe",
    "pipeline_1f1b": "1f1b",
    "pipeline_interleaved": "interleaved",
    "pipeline_zero_bubble": "zero_bubble",
}
"""Registered names of pipelines, and their schedules."""


class ImpossibleError(ValueError):
    """A strategy cannot train this model in this world, or its step is not known; the message says why."""


@dataclass(frozen=True)
class Candidate:
    """A strategy with its options, and batches for each optimizer step."""

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    accumulate: int = 1

    def __str__(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.strategy}:{options}" if options else self.strategy


class Counts(NamedTuple):
    """What a step has of that which the calibration gives seconds; in the order of :class:`.ReferenceCost`."""

    batches: float
    tensors: float
    passes: float
    transfers_s: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A predicted optimizer step.

    Attributes:
        compute_s: forward and backward of the slowest rank.
        exposed_s, hidden_s: transfers that the rank waits for, and those behind its computation.
        bubble_s: waiting for other stages of a pipeline.
        optimizer_s, input_s: as in :class:`.Phases`.
        other_s: Lightning's loop, hooks, and the strategy's fixed cost.
        uncertainty: the longest step of the interval over this one, less 1.
        samples: of all ranks in a step.
        memory: bytes of the fullest device.
        activations_bytes: saved for backward on that device.
        sent_bytes: link -> bytes that a host, or a rank inside a host, sends.
        counts: of which the step has the calibrated seconds.
    """

    candidate: Candidate
    world: World
    counts: Counts
    compute_s: float
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    bubble_s: float = 0.0
    optimizer_s: float = 0.0
    input_s: float = 0.0
    other_s: float = 0.0
    uncertainty: float = 0.0
    samples: float = 0.0
    memory: HeldBytes = NOTHING
    activations_bytes: int = 0
    sent_bytes: Mapping[str, float] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        return sum(self.parts_s.values())

    @property
    def parts_s(self) -> dict[str, float]:
        return {
            "computation": self.compute_s,
            "exposed communication": self.exposed_s,
            "bubble": self.bubble_s,
            "optimizer": self.optimizer_s,
            "input": self.input_s,
            "other": self.other_s,
        }

    @property
    def interval_s(self) -> tuple[float, float]:
        """The step between these is expected in 8 of 10 runs."""
        return self.step_s / (1 + self.uncertainty), self.step_s * (1 + self.uncertainty)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.step_s

    @property
    def memory_bytes(self) -> int:
        return self.memory.total + self.activations_bytes

    @property
    def limit(self) -> str:
        """The largest part of the step."""
        return max(self.parts_s, key=lambda part: self.parts_s[part])

    def efficiency(self, one: Prediction) -> float:
        """Samples a second of each device, over those of one device alone."""
        return self.samples_per_s / (self.world.size * one.samples_per_s)


def predict(model: ModelProfile, machine: Machine, candidate: Candidate, world: World) -> Prediction:
    """The step of ``candidate`` in ``world``.

    Raises:
        ImpossibleError: the strategy cannot have this world, or cannot train this model, or no such step is known.
    """
    name = candidate.strategy.removesuffix("_spawn")
    for refused in (name, f"{name} on {world.size} ranks"):
        if refused in model.refused:
            raise ImpossibleError(model.refused[refused])
    if world.size == 1 and name != "one_device":
        raise ImpossibleError(f"{name} needs 2 devices or more")
    if world.size > (cores := machine.cores(world)):
        raise ImpossibleError(
            f"{world.size} ranks would share {cores:.0f} cores, and how much slower each of them is is not known; take "
            "no more ranks than cores"
        )
    try:
        if name in PIPELINES:
            return _pipeline(model, machine, candidate, world)
        if name == "tensor_split":
            return _tensor_split(model, machine, candidate, world)
        if name in ROWS:
            return _data_parallel(model, machine, candidate, world)
    except ImpossibleError:
        raise
    except ValueError as error:  # of the machine: a link that is not known
        raise ImpossibleError(str(error)) from error
    raise ImpossibleError(f"the step of {name} is not known; 'bench strategies' measures it")


def one_device(model: ModelProfile, machine: Machine, accumulate: int = 1) -> Prediction:
    """The step of one device alone."""
    return predict(model, machine, Candidate("one_device", accumulate=accumulate), World(1, 1))


def _prediction(
    model: ModelProfile, machine: Machine, candidate: Candidate, world: World, named: str, phases: Phases,
    *, passes: float = 0.0, tensors: float = 1.0, transfers_s: float = 0.0, exposed_s: float = 0.0, **parts: Any,
) -> Prediction:  # fmt: skip
    """The sum that all steps are, with the calibrated cost of the strategy ``named``.

    Args:
        phases: of the rank.
        passes, tensors: how often a pass, and each parameter tensor, costs time.
        transfers_s: exposed, as the formula has them; ``exposed_s`` are those that are not calibrated.
        parts: of the prediction.
    """
    k, cost = candidate.accumulate, machine.reference(named, world)
    counts = Counts(k, tensors * len(model.gradients), passes, transfers_s)
    other_s = k * (phases.other_s + cost.fixed_s) + counts.tensors * cost.tensor_s
    whole = {
        "candidate": candidate, "world": world, "counts": counts, "uncertainty": hypot(_UNCERTAINTY, model.disturbed),
        "compute_s": k * (phases.forward_s + phases.backward_s) + (k - 1) * phases.adding_s,
        "optimizer_s": phases.optimizer_s, "input_s": k * phases.input_s, "other_s": other_s,
        "exposed_s": exposed_s + cost.scale * transfers_s + passes * cost.pass_s,
        "samples": k * model.samples,
    }  # fmt: skip
    return Prediction(**{**whole, **parts})


def _data_parallel(model: ModelProfile, machine: Machine, candidate: Candidate, world: World) -> Prediction:
    name, options = candidate.strategy.removesuffix("_spawn"), candidate.options
    row, (n, d) = ROWS[name], world
    if row.is_one_host and n > 1:
        raise ImpossibleError(f"{name} works on one host only")
    if name == "ft_ddp" and machine.device_type != "cpu":
        raise ImpossibleError(f"gradients of {name} travel over the host, whose links are not calibrated beside GPUs")
    if model.divides_batch:
        model = replace(model.with_batches(1 / world.size), divides_batch=False)
    phases, size = model.phases_of(machine.crowd(world)), float(model.gradient_bytes)
    servers = max(2, n) if name == "sharded_ps" else int(options.get("num_servers") or 1)
    usual = row.bucket_bytes[n > 1] or usual_bucket_bytes(model.gradient_bytes, between_hosts=n > 1)
    bucket_bytes = options.get("bucket_cap_mb", 0) * 2**20 or usual
    named = "ring_ddp" if name == "ft_ddp" else name  # its costs
    ratio, every = 1.0, int(options.get("average_every", 1))
    if n > 1 and (compression := options.get("compression")):
        named, ratio = f"{named}:compression={compression}", RATIOS.get(compression, 0.0)
        if not any(each.strategy == named for each in machine.references):
            raise ImpossibleError(f"compression={compression!r} is not calibrated on {machine.name}")

    def seconds(operation: str, size_bytes: float) -> float:
        if operation == _COPIES:
            return 2 * (d - 1) * machine.link_inside(world).seconds(size_bytes)
        if operation == _SERVERS:  # which cut a large tensor into pieces of a bucket
            pieces, links = (
                max(1.0, size_bytes / bucket_bytes),
                (machine.link_inside(world), machine.link_between(world)),
            )
            return pieces * servers_s(world, size_bytes / pieces, servers, *links)
        return machine.all_reduce_s(world, size_bytes / ratio) / (2 if operation == _HALF else 1)

    messages = buckets_of(model.gradients, bucket_bytes) if row.during and world.size > 1 else []
    # Weights come back from owners after backward; from servers those of the last bucket alone.
    last = min(size, bucket_bytes) if row.after == _SERVERS else size
    after_s = seconds(row.after, last) if row.after else 0.0
    after_s += seconds(row.after, 0.0) if name == "ft_ddp" else 0.0  # a header goes first
    times = [(share, seconds(row.during, bucket)) for bucket, share in messages]
    all_s = sum(each for _, each in times) + after_s
    waited_s = all_s if machine.device_type == "cpu" else exposed(times, phases.backward_s) + after_s
    held, updaters = model.held, {"ranks": world.size, "servers": servers, "": 1}[row.updaters]
    if name == "ddp_sharded":
        largest = largest_shard([each for each, _ in reversed(model.gradients)], world.size) / max(1.0, size)
        gradients, optimizer = (round(largest * each) for each in (held.gradients_bytes, held.optimizer_bytes))
        held = HeldBytes(held.parameters_bytes, gradients, optimizer)
    elif row.updaters or row.during == _SERVERS:
        held = replace(held, optimizer_bytes=0)
    if options.get("outer_optimizer"):  # the weights at the last average, and their momentum
        held = replace(held, optimizer_bytes=held.optimizer_bytes + 2 * held.parameters_bytes)
    sent = {"host": 2 * (d - 1) * size if name == "dp" else size} if d > 1 else {}
    if n > 1:
        sent["network"] = 2 * (n - 1) * (d * size / servers if row.during == _SERVERS else size / n / ratio)
    return _prediction(
        model, machine, candidate, world, named, phases,
        transfers_s=waited_s / every, hidden_s=all_s - waited_s,
        optimizer_s=phases.optimizer_s / updaters, samples=candidate.accumulate * model.samples * world.size,
        memory=held, activations_bytes=model.activations_bytes,
        sent_bytes={link: each / every for link, each in sent.items()},
    )  # fmt: skip


def _tensor_split(model: ModelProfile, machine: Machine, candidate: Candidate, world: World) -> Prediction:
    part, k, n = model.splits.get(world.size), candidate.accumulate, world.nodes
    if part is None:
        raise ImpossibleError(f"no split of the layers over {world.size} ranks is known")
    sizes = [size for _, size in part.collectives]
    return _prediction(
        model, machine, candidate, world, "tensor_split", model.phases_of(machine.crowd(world), part.phases),
        passes=k * len(sizes), tensors=0.0,
        exposed_s=k * sum(machine.all_reduce_s(world, size) for size in sizes),
        memory=part.held, activations_bytes=part.activations_bytes,
        sent_bytes={"network": 2 * (n - 1) / n * k * sum(sizes)} if n > 1 else {"host": k * sum(sizes)},
    )  # fmt: skip


def _pipeline(model: ModelProfile, machine: Machine, candidate: Candidate, world: World) -> Prediction:
    """A pipeline over all ranks; every micro-batch but the first adds its gradients to those before."""
    k, options, schedule = candidate.accumulate, candidate.options, PIPELINES[candidate.strategy]
    if model.chain is None:
        raise ImpossibleError(model.refused.get("pipelines", "its layers were not measured"))
    ranks, samples = world.size, max(1, model.samples)
    wanted = 1 if candidate.strategy == "model_parallel" else options.get("num_micro_batches", 4 * ranks)
    a_rank = options.get("stages_per_rank") or (2 if schedule in LOOPED_SCHEDULES else 1)
    micro_batches = min(wanted, samples)
    balance = options.get("balance", model.chain.balance)
    plan = model.chain.plan(schedule, ranks, a_rank, micro_batches, samples, balance)
    stages, phases, whole_bytes = (
        plan.stages,
        model.phases_of(machine.crowd(world)),
        max(1, model.held.parameters_bytes),
    )
    both_s = (phases.forward_s + phases.backward_s) / plan.one_device_s if machine.device_type == "cpu" else 1.0
    adding_s = phases.adding_s * (micro_batches - 1) / micro_batches / whole_bytes
    forward_s = [both_s * stage.forward_s for stage in stages]
    backward_s = [both_s * stage.backward_s + adding_s * stage.parameters_bytes for stage in stages]
    hosts = [(i % ranks) // max(1, ranks // world.nodes) for i in range(len(stages))]
    cuts_s = [
        (machine.link_inside(world) if a == b else machine.link_between(world)).seconds(stage.output_bytes)
        for stage, a, b in zip(stages, hosts, hosts[1:], strict=False)
    ]
    orders, free = schedule_orders(schedule, ranks, a_rank, micro_batches), [0.0] * len(cuts_s)
    without_s, ones = step_time(orders, forward_s, backward_s, free), [1.0] * len(stages)
    busy_s = max(
        micro_batches * sum(forward_s[i] + backward_s[i] for i in range(rank, len(stages), ranks))
        for rank in range(ranks)
    )
    fullest = max(plan.memory, key=lambda rank: rank.total)
    return _prediction(
        model, machine, candidate, world, "pipeline_1f1b", phases,
        passes=k * step_time(orders, ones, ones, free), tensors=k * micro_batches,
        compute_s=k * busy_s, bubble_s=k * (without_s - busy_s),
        exposed_s=k * (step_time(orders, forward_s, backward_s, cuts_s) - without_s),
        optimizer_s=phases.optimizer_s * max(rank.parameters_bytes for rank in plan.memory) / whole_bytes,
        memory=HeldBytes(fullest.parameters_bytes, fullest.gradients_bytes, fullest.optimizer_bytes),
        activations_bytes=fullest.activations_bytes + fullest.recomputed_bytes,
        sent_bytes={
            "network" if world.nodes > 1 else "host": k * 2.0 * micro_batches * max(s.output_bytes for s in stages)
        },
    )  # fmt: skip


def exposed(times: Sequence[tuple[float, float]], backward_s: float) -> float:
    """Seconds from the end of backward to that of the last transfer.

    ``times`` are the share of backward after which each transfer is ready, and its seconds, in order.
    """
    end_s = 0.0
    for share, seconds in times:
        end_s = max(end_s, share * backward_s) + seconds
    return max(0.0, end_s - backward_s)


def buckets_of(gradients: Sequence[tuple[int, float]], bucket_bytes: float) -> list[tuple[float, float]]:
    """The bytes of each bucket, and the share of backward after which it is full."""
    buckets: list[tuple[float, float]] = []
    filled = 0.0
    for index, (size, share) in enumerate(gradients):
        filled += size
        if filled >= bucket_bytes or index == len(gradients) - 1:
            buckets.append((filled, share))
            filled = 0.0
    return buckets


def largest_shard(sizes: Sequence[int], num_ranks: int) -> int:
    """The bytes of the largest shard of tensors, in the order of the parameters: each goes to the smallest so far.

    FairScale's OSS makes these shards.
    """
    shards = [0] * num_ranks
    for size in sizes:
        shards[shards.index(min(shards))] += size
    return max(shards)
