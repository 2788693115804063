"""The machine that a plan is for: what ``calibrate`` has measured, as ``machine.json``, or a preset's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf, log
from typing import Any, NamedTuple

from lightning_multigpu.planning.scaling.links import INSTANT, Link, all_reduce_s

SCHEMA_VERSION = 1
OF_ACTIVATIONS = "all_reduce of activations"
"""Of layers that are split between hosts: the back end's, where gradients take the hierarchy's."""
TO_OWNER, FROM_OWNERS = "gradients to an owner", "weights from owners"
"""The reduce of a tensor to its owner, and the broadcasts of all owners at once, each of an equal part."""


class World(NamedTuple):
    """Hosts, and devices of each host."""

    nodes: int
    devices: int

    @property
    def size(self) -> int:
        return self.nodes * self.devices

    def __str__(self) -> str:
        return f"{self.nodes} x {self.devices}"


@dataclass(frozen=True, kw_only=True)
class ReferenceCost:
    """How a strategy's steps differ from the formula, from steps of a tiny, a deep and a large reference model.

    Attributes:
        strategy: registered name, with the compression if there is one: "ring_ddp:compression=int8".
        world: hosts and devices of the measurement.
        fixed_s: seconds that each batch takes in addition, whatever the model.
        scale: the measured time of its transfers over that of the formula; for pipelines, the latency of a message over
            the link's.
        busy: the share of a transfer in which the rank that computes beside it makes no progress: 0 on an accelerator,
            1 where the same core moves the bytes.
        slowing: the share by which computation takes longer than without transfers, where none of them hides.
        tensor_s: seconds that each parameter tensor adds; for pipelines, to each micro-batch.
        bucket_s: seconds that each bucket takes in addition; less than 0 where several travel at once.
        pass_s: seconds that each pass of a pipeline stage, or each collective of a split layer, takes in addition; less
            than 0 for collectives that took longer alone.
    """

    strategy: str
    world: World
    fixed_s: float = 0.0
    scale: float = 1.0
    busy: float = 0.0
    slowing: float = 0.0
    tensor_s: float = 0.0
    bucket_s: float = 0.0
    pass_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MeasuredCollective:
    """The fitted time of an operation between all ranks of a world."""

    operation: str
    world: World
    link: Link


@dataclass(frozen=True, kw_only=True)
class Coding:
    """Compression of gradients, named as in ``compression=``.

    ``ratio`` is that of bytes before to bytes after, ``s_per_byte`` the time to encode and decode a byte.
    """

    name: str
    ratio: float
    s_per_byte: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A host, or equal hosts, and what joins their devices.

    Attributes:
        device_type: "cpu" or "cuda".
        processor: name of the device that computes.
        devices: of a host.
        memory_bytes: of a device; 0 if unknown.
        flops_per_s: multiplications and additions of a device, as large matrices reach them; by dtype.
        memory_bytes_per_s: of a device's memory.
        inside, between: the links of two ranks of one host, and of two hosts.
        slowdown: ranks of a host that compute at once -> the time of a computation over its time alone.
        references: measured differences of strategies from their formulas.
        shares_cores: whether the hosts are emulated on one machine.
        disturbed: by world, "2 x 1": the share of the processors, or GPUs, that other processes took during the
            calibration.
        versions: of torch and of this package; empty for a preset.
    """

    name: str
    device_type: str
    processor: str = ""
    devices: int = 1
    memory_bytes: int = 0
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    memory_bytes_per_s: float = 0.0
    inside: Link = INSTANT
    between: Link | None = None
    slowdown: Mapping[int, float] = field(default_factory=dict)
    collectives: Sequence[MeasuredCollective] = ()
    references: Sequence[ReferenceCost] = ()
    codings: Sequence[Coding] = ()
    shares_cores: bool = False
    disturbed: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def rank_memory_bytes(self) -> float:
        """Memory of a rank: a device's, or the rank's share of the host's; infinite if unknown."""
        return (self.memory_bytes or inf) / (self.devices if self.device_type == "cpu" else 1)

    def crowd(self, world: World) -> int:
        """Ranks that compute at the same time on the cores and the memory of one machine; 1 for accelerators."""
        if self.device_type != "cpu":
            return 1
        return world.size if self.shares_cores else world.devices

    def cores(self, world: World) -> float:
        """Ranks of ``world`` that can compute at the same time; unlimited for accelerators."""
        machines = 1 if self.shares_cores else world.nodes
        return self.devices * machines if self.device_type == "cpu" else inf

    def slowdown_of(self, crowd: int) -> float:
        """The time of a computation with ``crowd`` ranks at once, over its time alone, as for the nearest measured."""
        known = {1: 1.0, **self.slowdown}
        nearest = min(known, key=lambda count: abs(log(count / crowd)))
        return known[nearest]

    def all_reduce_s(self, world: World, size_bytes: float, operation: str = "all_reduce") -> float:
        """Seconds of an all-reduce of ``size_bytes``: measured, or by the formula, corrected by the nearest measured.

        Args:
            world: its ranks.
            size_bytes: bytes of the tensor.
            operation: that of gradients, or :data:`OF_ACTIVATIONS`, which is the same where it was not measured.

        Raises:
            ValueError: the world has several hosts, and no link between hosts is known.
        """
        if world.size == 1:
            return 0.0
        wanted = ("all_reduce", operation)  # the later one counts
        return self._collective_s(wanted, world, size_bytes)

    def owners_s(self, operation: str, world: World, size_bytes: float) -> float:
        """Seconds of :data:`TO_OWNER` or :data:`FROM_OWNERS`; half of an all-reduce where they were not measured."""
        if world.size > 1 and any(each.operation == operation for each in self.collectives):
            return self._collective_s((operation,), world, size_bytes)
        return self.all_reduce_s(world, size_bytes) / 2

    def _collective_s(self, operations: Sequence[str], world: World, size_bytes: float) -> float:
        measured = {o.world: o.link for name in operations for o in self.collectives if o.operation == name}
        if world in measured:
            return measured[world].seconds(size_bytes)
        formula_s = self._all_reduce_by_formula_s(world, size_bytes)
        alike = [other for other in measured if (other.nodes > 1) == (world.nodes > 1)]
        if not alike:
            return formula_s
        nearest = min(alike, key=lambda other: abs(log(other.size / world.size)))
        return formula_s * measured[nearest].seconds(size_bytes) / self._all_reduce_by_formula_s(nearest, size_bytes)

    def _all_reduce_by_formula_s(self, world: World, size_bytes: float) -> float:
        return all_reduce_s(world.nodes, world.devices, size_bytes, self.link_inside(world), self.link_between(world))

    def link_inside(self, world: World) -> Link:
        """The link between two ranks of a host of ``world``: measured with as many ranks, or :attr:`inside`."""
        return self._messages(World(1, world.devices)) or self.inside

    def _messages(self, world: World) -> Link | None:
        found = (each for each in self.collectives if (each.operation, each.world) == ("send_recv", world))
        return next((each.link for each in found), None)

    def link_between(self, world: World) -> Link:
        """The link between two hosts of ``world``; one that takes no time for one host.

        Raises:
            ValueError: the world has several hosts, and no link between hosts is known.
        """
        if world.nodes == 1:
            return INSTANT
        measured = self._messages(world)
        if measured is not None:
            return measured
        if self.between is None:
            raise ValueError(
                f"{world} needs the link between hosts, which {self.name} does not have; calibrate on two hosts or "
                "more, or pass --link-gbit"
            )
        return self.between

    def reference(self, strategy: str, world: World) -> ReferenceCost:
        """The cost of a strategy in ``world``, or in the nearest measured world; zeros if it was not measured.

        ``strategy`` is the registered name, with its compression if there is one. The plain strategy's cost stands for
        a compression that was not measured.
        """
        plain, _, compression = strategy.partition(":")
        measured = "sync_ps" if plain == "async_ps" else strategy
        found = [each for each in self.references if each.strategy == measured]
        if not found and compression:
            return self.reference(plain, world)
        if not found:
            busy = 1.0 if self.device_type == "cpu" and world.nodes == 1 else 0.0
            return ReferenceCost(strategy=strategy, world=world, busy=busy)

        def distance(each: ReferenceCost) -> tuple[bool, float]:
            other = each.world
            return (other.nodes > 1) != (world.nodes > 1), abs(log(other.size / world.size))

        return min(found, key=distance)

    def with_link(self, gbit_per_s: float, latency_s: float = 20e-6) -> Machine:
        """The machine with another link between hosts."""
        inside = [each for each in self.collectives if each.world.nodes == 1]
        return replace(self, between=Link(latency_s, 8e-9 / gbit_per_s), collectives=inside)

    def as_json(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}


QUIET = 0.05
"""The share that other processes may take of a machine while it is measured; beyond, it is measured again."""


def differences(machine: Machine, now: Mapping[str, str]) -> list[str]:
    """The fields in which a calibrated machine is not this one, as sentences.

    ``now`` has "processor", "device_type", "torch" and "lightning_multigpu" of this process.
    """
    then = {"processor": machine.processor, "device_type": machine.device_type, **machine.versions}
    return [
        f"{name} was {then[name]} at the calibration, and is {value}"
        for name, value in now.items()
        if name in then and then[name] != value
    ]
