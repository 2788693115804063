"""The machine that a plan is for: what ``calibrate`` has measured, as ``machine.json``, or the figures of a preset.

The time of an operation lies on straight lines between the measured sizes. Worlds that were not measured are as far off
the formula as the nearest one that was. With N ranks that have S bytes each, and links of latency a and bandwidth B:

==================  =================================================  ====================================
operation           seconds                                            source
==================  =================================================  ====================================
ring all-reduce     2 (N-1) a + 2 (N-1)/N S/B                          Patarasuk and Yuan 2009
over n hosts        inside: as above with the ranks of a host;         Jia et al. 2018, arXiv:1807.11205,
                    between: as above with n, by the host's link       section 3.3
to owners and back  half of an all-reduce each                         Rajbhandari et al. 2020, ZeRO,
                                                                       arXiv:1910.02054, section 7
parameter servers   (s (n-1) + K - s) d (a + S/K / B) for n hosts of   Jiang et al. 2020, BytePS (OSDI),
                    d ranks, of which the fullest has s of K servers   section 4.1
==================  =================================================  ====================================

The assumptions: both directions of a link work at the same time, hosts are joined without a bottleneck between them,
and nothing else uses the links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from math import inf, log
from typing import Any, NamedTuple

SCHEMA_VERSION = 2
ALL_REDUCE, MESSAGE = "all_reduce", "send_recv"
QUIET = 0.05
"""The share that other processes may take of a machine while it is measured; beyond, it is measured again."""


class World(NamedTuple):
    """Hosts, and devices of each host."""

    nodes: int
    devices: int

    @property
    def size(self) -> int:
        return self.nodes * self.devices

    def __str__(self) -> str:
        return f"{self.nodes} x {self.devices}"


class Point(NamedTuple):
    """A size, and its measured seconds."""

    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class Link:
    """The time of a transfer by its bytes: at least two points, by size."""

    points: Sequence[Point]

    @classmethod
    def straight(cls, latency_s: float, s_per_byte: float) -> Link:
        """The link of two figures."""
        return cls([Point(0, latency_s), Point(1 << 30, latency_s + (1 << 30) * s_per_byte)])

    def seconds(self, size_bytes: float) -> float:
        """On the line of the two points around the size, or of the nearest two."""
        (a, a_s), (b, b_s) = next(
            (pair for pair in pairwise(self.points) if size_bytes <= pair[1].size_bytes), self.points[-2:]
        )
        return max(0.0, a_s + (size_bytes - a) / (b - a) * (b_s - a_s))


INSTANT = Link.straight(0.0, 0.0)


def ring_all_reduce_s(num_ranks: int, size_bytes: float, link: Link) -> float:
    """A ring all-reduce: N - 1 steps of reduce-scatter and N - 1 of all-gather, of S / N bytes each."""
    return 2 * (num_ranks - 1) * link.seconds(size_bytes / num_ranks)


def all_reduce_s(world: World, size_bytes: float, inside: Link, between: Link) -> float:
    """An all-reduce inside each host, and between the hosts, whose link all ranks of a host share."""
    return ring_all_reduce_s(world.devices, size_bytes, inside) + ring_all_reduce_s(world.nodes, size_bytes, between)


def servers_s(world: World, size_bytes: float, servers: int, inside: Link, between: Link) -> float:
    """Gradients of all ranks to K servers on the ranks' hosts, while the weights of the bucket before come back.

    The busiest link decides, which is that of the host with most servers. Into it come the parts of the other hosts'
    ranks, and the weights of the other servers for its own ranks; as much leaves it. Ranks of a server's host use the
    host's memory.
    """
    share, (nodes, devices) = size_bytes / servers, world
    if nodes == 1:
        return devices * inside.seconds(share)
    most = -(-servers // nodes)
    return devices * (most * (nodes - 1) + servers - most) * between.seconds(share)


@dataclass(frozen=True, kw_only=True)
class ReferenceCost:
    """What a strategy's steps take beyond the formula, from steps of reference models.

    Attributes:
        strategy: registered name, with the compression if there is one: "ring_ddp:compression=int8".
        world: hosts and devices of the measurement.
        fixed_s: seconds that each batch takes in addition, whatever the model.
        tensor_s: seconds that each parameter tensor adds; for pipelines, to each micro-batch.
        pass_s: seconds that each pass of a pipeline stage, or each collective of a split layer, takes in addition.
        scale: the measured time of its transfers of gradients over that of the formula.
    """

    strategy: str
    world: World
    fixed_s: float = 0.0
    tensor_s: float = 0.0
    pass_s: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class MeasuredCollective:
    """The time of an operation between all ranks of a world."""

    operation: str
    world: World
    link: Link


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A host, or equal hosts, and what joins their devices.

    Attributes:
        device_type: "cpu" or "cuda".
        processor: name of the device that computes.
        devices: of a host.
        memory_bytes: of a device; 0 if unknown.
        inside, between: the links of two ranks of one host, and of two hosts.
        references: what steps of strategies take beyond their formulas.
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
    inside: Link = INSTANT
    between: Link | None = None
    collectives: Sequence[MeasuredCollective] = ()
    references: Sequence[ReferenceCost] = ()
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

    def all_reduce_s(self, world: World, size_bytes: float) -> float:
        """Seconds of an all-reduce: measured, or by the formula, corrected by the nearest measured.

        Raises:
            ValueError: the world has several hosts, and no link between hosts is known.
        """
        if world.size == 1:
            return 0.0
        alike = {
            each.world: each.link
            for each in self.collectives
            if each.operation == ALL_REDUCE and (each.world.nodes > 1) == (world.nodes > 1)
        }
        if world in alike:
            return alike[world].seconds(size_bytes)
        formula_s = self._formula_s(world, size_bytes)
        if not alike:
            return formula_s
        nearest = min(alike, key=lambda other: abs(log(other.size / world.size)))
        return formula_s * alike[nearest].seconds(size_bytes) / self._formula_s(nearest, size_bytes)

    def _formula_s(self, world: World, size_bytes: float) -> float:
        return all_reduce_s(world, size_bytes, self.link_inside(world), self.link_between(world))

    def link_inside(self, world: World) -> Link:
        """The link between two ranks of a host of ``world``: measured with as many ranks, or :attr:`inside`."""
        return self._messages(World(1, world.devices)) or self.inside

    def link_between(self, world: World) -> Link:
        """The link between two hosts of ``world``; one that takes no time for one host.

        Raises:
            ValueError: the world has several hosts, and no link between hosts is known.
        """
        found = INSTANT if world.nodes == 1 else self._messages(world) or self.between
        if found is None:
            raise ValueError(
                f"{world} needs the link between hosts, which {self.name} does not have; calibrate on two hosts or "
                "more, or pass --link-gbit"
            )
        return found

    def _messages(self, world: World) -> Link | None:
        found = (each for each in self.collectives if (each.operation, each.world) == (MESSAGE, world))
        return next((each.link for each in found), None)

    def reference(self, strategy: str, world: World) -> ReferenceCost:
        """The cost of a strategy in ``world``, or in the nearest measured world; zeros if it was not measured.

        ``strategy`` is the registered name, with its compression if there is one. The plain strategy's cost stands for
        a compression that was not measured, and ``sync_ps``'s for ``async_ps``.
        """
        plain, _, compression = strategy.partition(":")
        measured = "sync_ps" if plain == "async_ps" else strategy
        found = [each for each in self.references if each.strategy == measured]
        if not found and compression:
            return self.reference(plain, world)

        def distance(each: ReferenceCost) -> tuple[bool, float]:
            other = each.world
            return (other.nodes > 1) != (world.nodes > 1), abs(log(other.size / world.size))

        return min(found, key=distance, default=ReferenceCost(strategy=strategy, world=world))

    def with_link(self, gbit_per_s: float, latency_s: float = 20e-6) -> Machine:
        """The machine with another link between hosts."""
        inside = [each for each in self.collectives if each.world.nodes == 1]
        return replace(self, between=Link.straight(latency_s, 8e-9 / gbit_per_s), collectives=inside)

    def as_json(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}


def differences(then: Machine, now: Machine) -> list[str]:
    """The processor, kind of device and versions in which a calibrated machine is not this one, as sentences."""
    before, after = (
        {"processor": each.processor, "device_type": each.device_type, **each.versions} for each in (then, now)
    )
    return [
        f"{name} was {before[name]} at the calibration, and is {value}"
        for name, value in after.items()
        if before.get(name, value) != value
    ]
