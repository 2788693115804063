"""The step model: a training step of each strategy, from a profile of the model and the machine.

A data-parallel step on each rank::

    input  forward  backward .......................[wait for transfers]  optimizer  other
                       [b2 ready] [b1 ready] [b0 ready]
    transfers              [-- b2 --][-- b1 --][---- b0 ----]
                              hidden              exposed

While a transfer runs, backward proceeds at ``1 - busy`` of its speed, where ``busy`` is the share of a core that moves
the bytes. Buckets fill in the order in which gradients become ready, as in Li et al. 2020, "PyTorch Distributed",
section 3.2. Pipelines follow the orders of :mod:`..pipelines.schedule_order`, each pass with the fixed time that the
machine's calibration found. Ranks of one machine are slower by a measured factor. Every strategy adds what its
calibration found beyond its formula: see :class:`.ReferenceCost`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from math import sqrt
from typing import Any

from lightning_multigpu.planning.pipelines.pipeline_prediction import PipelinePlan
from lightning_multigpu.planning.pipelines.schedule_order import (
    LOOPED_SCHEDULES,
    ScheduleName,
    schedule_orders,
    step_time,
)
from lightning_multigpu.planning.pipelines.timeline import NOTHING, HeldBytes
from lightning_multigpu.planning.scaling.links import servers_s
from lightning_multigpu.planning.scaling.machine_model import (
    FROM_OWNERS,
    OF_ACTIVATIONS,
    TO_OWNER,
    Machine,
    ReferenceCost,
    World,
)
from lightning_multigpu.planning.scaling.model_profile import ModelProfile, Phases

ON_ONE_HOST_BYTES = 25 << 20
BETWEEN_HOSTS_BYTES = 4 << 20
_MOST_BUCKETS = 128
_OWNER_BYTES = 1 << 20
_SERVED = ("sync_ps", "sharded_ps", "async_ps")
_SERVER_BYTES = {True: 4 << 20, False: 1 << 20}
"""A bucket of parameter servers, on one host and on several."""
_LEAST_UNCERTAINTY = 0.15
"""The uncertainty of a prediction where nothing varied: 8 of 10 errors of ``benchmarks.planner`` are smaller."""

PIPELINES: dict[str, ScheduleName] = {
    "model_parallel": "gpipe",
    "gpipe": "gpipe",
    "pipeline_1f1b": "1f1b",
    "pipeline_interleaved": "interleaved",
    "pipeline_zero_bubble": "zero_bubble",
}
"""Registered names of pipelines, and their schedules."""
_SPAWNED = "_spawn"


class ImpossibleError(ValueError):
    """A strategy cannot train this model in this world; the message says why."""


@dataclass(frozen=True)
class Candidate:
    """A strategy with its options, and batches for each optimizer step."""

    strategy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    accumulate: int = 1

    def __str__(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.strategy}:{options}" if options else self.strategy


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
    """

    candidate: Candidate
    world: World
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


def usual_bucket_bytes(total_bytes: int, *, between_hosts: bool) -> int:
    """The default size for the ring, or for shared memory on one host; more for large models.

    On a link of 1 Gbit/s the first bucket of 4 MiB travels during most of backward. On one host there is little time to
    hide, and every bucket makes ranks wait for each other once more.
    """
    usual = BETWEEN_HOSTS_BYTES if between_hosts else ON_ONE_HOST_BYTES
    return max(usual, -(-total_bytes // _MOST_BUCKETS))


def predict(model: ModelProfile, machine: Machine, candidate: Candidate, world: World) -> Prediction:
    """The step of ``candidate`` in ``world``.

    Raises:
        ImpossibleError: the strategy cannot have this world, or cannot train this model.
    """
    name = candidate.strategy.removesuffix(_SPAWNED)
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
    if name in ("cpu_ps", "dp") and world.nodes > 1:
        raise ImpossibleError(f"{name} works on one host only")
    step = _Step(model, machine, candidate, world)
    families = dict.fromkeys(PIPELINES, step.pipeline) | {"tensor_split": step.tensor_split, "hybrid": step.hybrid}
    try:
        return families.get(name, step.data_parallel)()
    except ImpossibleError:
        raise
    except ValueError as error:  # of the machine: a link that is not known
        raise ImpossibleError(str(error)) from error


def one_device(model: ModelProfile, machine: Machine, accumulate: int = 1) -> Prediction:
    """The step of one device alone."""
    return predict(model, machine, Candidate("one_device", accumulate=accumulate), World(1, 1))


def bucketed(gradients: Sequence[tuple[int, float]], bucket_bytes: float) -> list[tuple[float, float]]:
    """The bytes of each bucket, and the share of backward after which it is full."""
    buckets: list[tuple[float, float]] = []
    filled = 0.0
    for index, (size, share) in enumerate(gradients):
        filled += size
        if filled >= bucket_bytes or index == len(gradients) - 1:
            buckets.append((filled, share))
            filled = 0.0
    return buckets


def owner_messages(
    gradients: Sequence[tuple[int, float]], buffer_bytes: float, num_ranks: int
) -> list[tuple[float, float]]:
    """The messages of FairScale's ShardedDataParallel to owners, as :func:`bucketed` gives those of buckets.

    Each owner's smallest gradients share a buffer, which is sent when all of them are ready; the others travel alone.
    """
    owners = _owners([size for size, _ in reversed(gradients)], num_ranks)[::-1]
    alone: list[tuple[float, float]] = []
    buffers = [(0.0, 0.0)] * num_ranks
    for (size, share), owner in sorted(zip(gradients, owners, strict=True), key=lambda pair: pair[0][0]):
        filled, ready = buffers[owner]
        if filled + size <= buffer_bytes:
            buffers[owner] = filled + size, max(ready, share)
        else:
            alone.append((size, share))
    return sorted([*alone, *(each for each in buffers if each[0])], key=lambda message: message[1])


def messages_of(
    name: str, gradients: Sequence[tuple[int, float]], bucket_bytes: float, num_ranks: int
) -> list[tuple[float, float]]:
    """The buckets of a strategy, or its messages to owners, as :func:`bucketed` gives them."""
    if name == "ddp_sharded":
        return owner_messages(gradients, bucket_bytes, num_ranks)
    return bucketed(gradients, bucket_bytes)


def bucket_timeline(
    messages: Sequence[tuple[float, float]], backward_s: float, seconds: Callable[[float], float], busy: float
) -> tuple[float, float]:
    """Seconds from the start of backward to the end of the last transfer, and seconds of all transfers.

    Args:
        messages: bytes and the share of backward after which each is ready, in order.
        backward_s: of backward without transfers.
        seconds: the time of a transfer by its bytes.
        busy: the share of a transfer in which backward makes no progress.
    """
    now = progress = total = 0.0
    for bucket, share in messages:
        ready = share * backward_s
        if progress < ready:  # no transfer runs
            now, progress = now + ready - progress, ready
        left = seconds(bucket)
        total += left
        free = (1 - busy) * left  # progress of backward beside the whole transfer
        if progress + free <= backward_s:
            progress += free
        else:
            progress = backward_s
        now += left
    return now + max(0.0, backward_s - progress), total


@dataclass(frozen=True)
class _Step:
    """A step of ``candidate``, which trains ``model`` in ``world`` on ``machine``; a method for each family."""

    model: ModelProfile
    machine: Machine
    candidate: Candidate
    world: World

    def data_parallel(self) -> Prediction:
        machine, world, name = self.machine, self.world, self.candidate.strategy.removesuffix(_SPAWNED)
        if self.model.divides_batch:
            divided = replace(self.model.with_batches(1 / world.size), divides_batch=False)
            return replace(self, model=divided).data_parallel()
        model, phases, k = self.model, self._phases(), self.candidate.accumulate
        options = {**self.candidate.options}
        named = compressed_name(name, options.get("compression"))
        cost = machine.reference(named, world) if world.size > 1 else ReferenceCost(strategy=name, world=world)
        asked_bytes = options.get("bucket_cap_mb", 0) * 2**20
        bucket_bytes = asked_bytes or default_bucket_bytes(name, model.gradient_bytes, world)
        optimizer_s = phases.optimizer_s
        sent: dict[str, float] = {}
        if world.size == 1:
            end_s, transfers_s = phases.backward_s, 0.0
        else:
            seconds, sent, at_end_s = self._transfers(name, options, bucket_bytes)
            end_s, transfers_s = bucket_timeline(
                messages_of(name, model.gradients, bucket_bytes, world.size),
                phases.backward_s,
                lambda b: max(0.0, cost.scale * seconds(b) + cost.bucket_s),
                cost.busy,
            )
            end_s, transfers_s = end_s + cost.scale * at_end_s, transfers_s + cost.scale * at_end_s
        if name in ("ddp_sharded", "cpu_ps"):
            optimizer_s /= world.size
        elif name == "sharded_ps":
            optimizer_s /= max(2, world.nodes)
        exposed_s = end_s - phases.backward_s + cost.slowing * (phases.forward_s + phases.backward_s)
        compute_s = k * (phases.forward_s + phases.backward_s) + (k - 1) * phases.adding_s
        every = int(options.get("average_every", 1))
        return self._prediction(
            phases,
            cost,
            compute_s=compute_s,
            exposed_s=exposed_s / every,
            hidden_s=max(0.0, transfers_s - exposed_s),
            optimizer_s=optimizer_s,
            uncertainty=self._uncertainty(compute_s, exposed_s),
            samples=k * model.samples * world.size,
            memory=_data_parallel_memory(model, name, world),
            activations_bytes=model.activations_bytes,
            sent_bytes={link: bytes_ / every for link, bytes_ in sent.items()},
        )

    def pipeline(self) -> Prediction:
        return self._staged(self._plan(self.world.size), 1.0)

    def tensor_split(self) -> Prediction:
        part = self.model.splits.get(self.world.size)
        if part is None:
            raise ImpossibleError(f"no split of the layers over {self.world.size} ranks is known")
        machine, world, k, phases = self.machine, self.world, self.candidate.accumulate, self._phases(part.phases)
        cost = machine.reference("tensor_split", world)
        exposed_s = cost.slowing * (phases.forward_s + phases.backward_s) + sum(
            max(0.0, cost.scale * machine.all_reduce_s(world, size, OF_ACTIVATIONS) + cost.pass_s)
            for _, size in part.collectives
        )
        bytes_ = float(sum(size for _, size in part.collectives))
        sent = {"network": 2 * (world.nodes - 1) / world.nodes * bytes_} if world.nodes > 1 else {"host": bytes_}
        compute_s = k * (phases.forward_s + phases.backward_s) + (k - 1) * phases.adding_s
        return self._prediction(
            phases,
            cost,
            compute_s=compute_s,
            exposed_s=k * exposed_s,
            optimizer_s=phases.optimizer_s,
            uncertainty=self._uncertainty(compute_s, exposed_s),
            samples=k * self.model.samples,
            memory=part.held,
            activations_bytes=part.activations_bytes,
            sent_bytes={link: k * each for link, each in sent.items()},
        )

    def hybrid(self) -> Prediction:
        """A mesh data x pipeline x tensor: that of the options, or the fastest that fits in memory."""
        asked = [self.candidate.options.get(f"{axis}_parallel_size") for axis in ("data", "pipeline", "tensor")]
        found = []
        for tensor in _divisors(self.world.size):
            for pipeline in _divisors(self.world.size // tensor):
                mesh = (self.world.size // tensor // pipeline, pipeline, tensor)
                if all(wanted in (None, size) for wanted, size in zip(asked, mesh, strict=True)):
                    with suppress(ImpossibleError):
                        found.append(self._mesh(*mesh))
        if not found:
            raise ImpossibleError(f"no mesh of {self.world.size} ranks was measured")
        fits = [each for each in found if each.memory_bytes <= self.machine.rank_memory_bytes]
        return max(fits or found, key=lambda one: one.samples_per_s)

    def _prediction(self, phases: Phases, cost: ReferenceCost, **parts: Any) -> Prediction:
        """The prediction, with what all families have: loading, the loop, and the strategy's fixed cost."""
        k, tensors_s = self.candidate.accumulate, len(self.model.gradients) * cost.tensor_s
        other_s = k * (phases.other_s + cost.fixed_s) + tensors_s
        both = {"candidate": self.candidate, "world": self.world, "input_s": k * phases.input_s, "other_s": other_s}
        return Prediction(**{**both, **parts})

    def _phases(self, of: Phases | None = None) -> Phases:
        """The phases of a rank, or of its part, beside the other ranks of its machine."""
        return (of or self.model.phases).times(self.machine.slowdown_of(self.machine.crowd(self.world)))

    def _transfers(
        self, name: str, options: Mapping[str, Any], bucket_bytes: float
    ) -> tuple[Callable[[float], float], dict[str, float], float]:
        """Seconds of a bucket by its bytes, bytes sent in a step by link, and seconds of transfers after backward.

        Weights come back from owners after backward. From servers those of a bucket come back while the next one is
        sent, and those of the last one after it.
        """
        machine, world, size = self.machine, self.world, float(self.model.gradient_bytes)
        n, d = world
        between, inside = machine.link_between(world), machine.link_inside(world)
        network = {"network": 2 * (n - 1) / n * size} if n > 1 else {}
        memory = {"host": size} if d > 1 else {}
        if name == "dp":
            return (lambda b: 0.0), {"host": 2 * (d - 1) * size}, 2 * (d - 1) * inside.seconds(size)
        if name == "cpu_ps":  # to the host and back, half of an all-reduce each
            return (lambda b: machine.all_reduce_s(world, b) / 2), {"host": size}, machine.all_reduce_s(world, size) / 2
        if name == "ddp_sharded":
            back_s = machine.owners_s(FROM_OWNERS, world, size)
            return (lambda b: machine.owners_s(TO_OWNER, world, b)), {**memory, **network}, back_s
        if name in _SERVED:
            servers = int(options.get("num_servers") or 1) if name != "sharded_ps" else max(2, n)

            def push(b: float) -> float:  # servers cut a large tensor into pieces of a bucket
                pieces = max(1.0, b / bucket_bytes)
                return pieces * servers_s(n, d, b / pieces, servers, inside, between)

            to_servers = {"network": 2 * (n - 1) * d * size / servers} if n > 1 else {}
            return push, {**memory, **to_servers}, push(min(size, bucket_bytes))
        compression = options.get("compression")
        if not compression or n == 1:
            return (lambda b: machine.all_reduce_s(world, b)), {**memory, **network}, 0.0
        coding = next((each for each in machine.codings if each.name == _name_of(compression)), None)
        if coding is None:
            raise ImpossibleError(f"compression={compression!r} is not calibrated on {machine.name}")
        crowded = machine.slowdown_of(machine.crowd(world)) / machine.slowdown_of(machine.devices)
        coding_s = coding.s_per_byte * max(1.0, crowded)

        def compressed(b: float) -> float:
            return machine.all_reduce_s(world, b / coding.ratio) + b * coding_s

        return compressed, {**memory, "network": network["network"] / coding.ratio}, 0.0

    def _plan(self, num_ranks: int) -> PipelinePlan:
        """The pipeline over ``num_ranks`` that the candidate asks for, of a sample a micro-batch or more."""
        name, options, model = self.candidate.strategy, self.candidate.options, self.model
        if model.chain is None:
            raise ImpossibleError(model.refused.get("pipelines", "its layers were not measured"))
        schedule = PIPELINES[name]
        wanted = 1 if name == "model_parallel" else options.get("num_micro_batches", 4 * num_ranks)
        a_rank = options.get("stages_per_rank") or (2 if schedule in LOOPED_SCHEDULES else 1)
        samples, balance = max(1, model.samples), options.get("balance", model.chain.balance)
        return model.chain.plan(schedule, num_ranks, a_rank, min(wanted, samples), samples, balance)

    def _staged(self, plan: PipelinePlan, factor: float) -> Prediction:
        """A pipeline over all ranks; ``factor`` multiplies the time of each pass.

        Every micro-batch but the first adds its gradients to those before.
        """
        machine, world, k = self.machine, self.world, self.candidate.accumulate
        ranks, micro_batches, stages = len(plan.memory), plan.num_micro_batches, plan.stages
        phases = self._phases()
        both_s = (phases.forward_s + phases.backward_s) / plan.one_device_s if machine.device_type == "cpu" else 1.0
        cost = machine.reference("pipeline_1f1b", world)
        tensors_s = micro_batches * len(self.model.gradients) * cost.tensor_s
        cost = replace(cost, fixed_s=cost.fixed_s + tensors_s, tensor_s=0.0)
        adding_s = phases.adding_s * (micro_batches - 1) / micro_batches / max(1, self.model.held.parameters_bytes)
        forward_s = [factor * both_s * stage.forward_s + cost.pass_s for stage in stages]
        backward_s = [
            factor * (both_s * stage.backward_s + adding_s * stage.parameters_bytes) + cost.pass_s for stage in stages
        ]
        per_host = max(1, ranks // world.nodes)
        cuts_s = []
        for i, stage in enumerate(stages[:-1]):
            is_inside = (i % ranks) // per_host == ((i + 1) % ranks) // per_host
            link = machine.link_inside(world) if is_inside else machine.link_between(world)
            cuts_s.append(link.latency_times(cost.scale).seconds(stage.output_bytes))
        orders = schedule_orders(plan.schedule, ranks, len(stages) // ranks, micro_batches)
        total_s = step_time(orders, forward_s, backward_s, cuts_s)
        without_s = step_time(orders, forward_s, backward_s, [0.0] * len(cuts_s))
        busy_s = max(
            micro_batches * sum(forward_s[i] + backward_s[i] for i in range(rank, len(stages), ranks))
            for rank in range(ranks)
        )
        share = max(rank.parameters_bytes for rank in plan.memory) / max(1, self.model.held.parameters_bytes)
        fullest, sent_bytes = plan.largest_memory, k * 2.0 * micro_batches * max(s.output_bytes for s in stages)
        return self._prediction(
            phases,
            cost,
            compute_s=k * busy_s,
            exposed_s=k * (total_s - without_s),
            bubble_s=k * (without_s - busy_s),
            optimizer_s=phases.optimizer_s * share,
            uncertainty=self._uncertainty(busy_s, total_s - without_s),
            samples=k * self.model.samples,
            memory=HeldBytes(fullest.parameters_bytes, fullest.gradients_bytes, fullest.optimizer_bytes),
            activations_bytes=fullest.activations_bytes + fullest.recomputed_bytes,
            sent_bytes={"network" if world.nodes > 1 else "host": sent_bytes},
        )

    def _mesh(self, data: int, pipeline: int, tensor: int) -> Prediction:
        """Neighbouring ranks split layers, then form pipelines, between which gradients of a part are averaged."""
        machine, world = self.machine, self.world
        inner = replace(self, world=_inner(world, pipeline * tensor))
        sizes = {"data_parallel_size": data, "pipeline_parallel_size": pipeline, "tensor_parallel_size": tensor}
        named = replace(self.candidate, options=sizes)
        if pipeline > 1:
            base = inner._pipeline_of_groups(tensor)
        elif tensor > 1:
            base = inner.tensor_split()
        else:
            ring = replace(self.candidate, strategy="ring_ddp", options={})
            return replace(replace(self, candidate=ring).data_parallel(), candidate=named)
        slower = machine.slowdown_of(machine.crowd(world)) / machine.slowdown_of(machine.crowd(inner.world))
        outer = World(min(world.nodes, data), max(1, data // world.nodes))
        reduce_s = machine.all_reduce_s(outer, base.memory.gradients_bytes) if data > 1 else 0.0
        return replace(
            base,
            candidate=named,
            world=world,
            compute_s=base.compute_s * slower,
            exposed_s=base.exposed_s + reduce_s,
            samples=base.samples * data,
        )

    def _pipeline_of_groups(self, tensor: int) -> Prediction:
        """A pipeline whose stages are groups of ``tensor`` ranks that split each layer.

        Each pass takes as long, and each rank holds as much, as the split model's share of the whole one.
        """
        pipelined = replace(self, candidate=replace(self.candidate, strategy="pipeline_1f1b"))
        if tensor == 1:
            return pipelined.pipeline()
        model, plan = self.model, pipelined._plan(self.world.size // tensor)
        group = replace(self, candidate=replace(self.candidate, accumulate=1), world=_inner(self.world, tensor))
        split, whole = group.tensor_split(), group._phases()
        factor = (split.compute_s + split.exposed_s) / (whole.forward_s + whole.backward_s)
        base = pipelined._staged(plan, factor)
        share = split.memory.total / max(1, model.held.total)
        held = HeldBytes(*(round(share * getattr(base.memory, each.name)) for each in fields(HeldBytes)))
        activations = split.activations_bytes / max(1, model.activations_bytes)
        return replace(base, memory=held, activations_bytes=round(activations * base.activations_bytes))

    def _uncertainty(self, compute_s: float, exposed_s: float) -> float:
        """The uncertainty: what others took during the measurements, and what is not known about the transfers."""
        share = exposed_s / (compute_s + exposed_s) if exposed_s else 0.0
        measured = any(each.world == self.world for each in self.machine.references)
        transfers = share * (0.1 if measured else 0.3)
        return sqrt(_LEAST_UNCERTAINTY**2 + self.model.disturbed**2 + transfers**2)


def default_bucket_bytes(name: str, gradient_bytes: int, world: World) -> int:
    """Bytes of a bucket of a strategy without options; for owners of a buffer."""
    if name == "ddp_sharded":
        return _OWNER_BYTES
    if name in _SERVED:
        return _SERVER_BYTES[world.nodes == 1]
    return usual_bucket_bytes(gradient_bytes, between_hosts=world.nodes > 1)


def compressed_name(name: str, compression: Any) -> str:
    """The name of a strategy's reference cost: with the compression, if there is one."""
    return f"{name}:compression={_name_of(compression)}" if compression else name


def _name_of(compression: Any) -> str:
    return str(compression["name"] if isinstance(compression, Mapping) else compression)


def _data_parallel_memory(model: ModelProfile, name: str, world: World) -> HeldBytes:
    """Bytes of a rank; servers, the host and owners hold optimizer states, and owners only their gradients."""
    held = model.held
    if name == "ddp_sharded":
        share = largest_shard([size for size, _ in reversed(model.gradients)], world.size) / max(
            1, held.gradients_bytes
        )
        return HeldBytes(
            held.parameters_bytes, round(held.gradients_bytes * share), round(held.optimizer_bytes * share)
        )
    if name in (*_SERVED, "cpu_ps"):
        return HeldBytes(held.parameters_bytes, held.gradients_bytes, 0)
    return held


def largest_shard(sizes: Sequence[int], num_ranks: int) -> int:
    """The bytes of the largest of the shards that FairScale's OSS makes of tensors, in the order of the parameters."""
    shards = [0] * num_ranks
    for size, owner in zip(sizes, _owners(sizes, num_ranks), strict=True):
        shards[owner] += size
    return max(shards)


def _owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """The owner of each tensor: the rank with the least so far, as in FairScale's OSS."""
    shards, owners = [0] * num_ranks, []
    for size in sizes:
        owners.append(shards.index(min(shards)))
        shards[owners[-1]] += size
    return owners


def _inner(world: World, size: int) -> World:
    """The ranks of one pipeline or tensor group: neighbours, so on as few hosts as they fill."""
    return World(1, size) if size <= world.devices else World(size // world.devices, world.devices)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
