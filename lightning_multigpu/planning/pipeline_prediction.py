"""What a pipeline is predicted to take, from what its layers cost on one device: pure functions.

::

    costs of the layers -> split -> when each pass begins and ends -> step time, bubble, picture
                                 -> what each rank holds           -> memory
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_multigpu.planning.schedule_order import Work, work_times
from lightning_multigpu.planning.stage_costs import HeldBytes, LinkCost, PartCost, StageCosts
from lightning_multigpu.planning.timeline import BUSY, Interval, Timeline


@dataclass(frozen=True)
class PlannedStage:
    """A stage and what it is predicted to take for one micro-batch.

    Attributes:
        rank: of the pipeline; its last rank has the first stage.
        layers: the layers ``[start, stop)``.
        parameters_bytes: of these layers.
        forward_s, backward_s: computing.
        transfer_s: of its output and of the gradient that it sends back.
    """

    rank: int
    layers: tuple[int, int]
    parameters_bytes: int
    forward_s: float
    backward_s: float
    transfer_s: float


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes that a rank needs.

    Attributes:
        rank: of the pipeline.
        held: for the parameters that it holds.
        activations: for what is kept for backward at most.
        recomputed: for what is kept in addition, of one layer at a time, while that layer's backward pass runs.
    """

    rank: int
    held: HeldBytes
    activations: int
    recomputed: int

    @property
    def total(self) -> int:
        return self.held.total + self.activations + self.recomputed


@dataclass(frozen=True)
class Plan:
    """A pipeline as it is predicted to run.

    Attributes:
        schedule, num_micro_batches: what is predicted.
        stages: in order.
        timelines: of each rank, by position: the last rank's first.
        memory: of each rank, by position.
        one_device_s: what one device takes for the same batch.
    """

    schedule: str
    num_micro_batches: int
    stages: tuple[PlannedStage, ...]
    timelines: tuple[Timeline, ...]
    memory: tuple[PlannedMemory, ...]
    one_device_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a batch, forward and backward, without the optimizer."""
        return max(interval.end_s for timeline in self.timelines for interval in timeline)

    @property
    def bubble(self) -> float:
        """1 - busy / wall, over all ranks; sending is not busy."""
        busy_s = sum(i.seconds for timeline in self.timelines for i in timeline if i.kind in BUSY)
        return 1 - busy_s / (len(self.timelines) * self.step_s)

    @property
    def relative_throughput(self) -> float:
        """Samples a second, relative to one device."""
        return self.one_device_s / self.step_s

    @property
    def fullest(self) -> PlannedMemory:
        """Of the rank that needs most."""
        return max(self.memory, key=lambda rank: rank.total)


class NamedChain(Protocol):
    """The split module: its dotted name, and a description for people."""

    @property
    def name(self) -> str: ...

    def describe(self) -> str: ...


@dataclass
class PipelinePlans:
    """Plans of one pipeline.

    Attributes:
        num_ranks: P.
        num_pipelines: side by side, each of which gets its part of the batch.
        balance: the strategy's.
        link: between neighbouring ranks.
        num_samples: of a pipeline's part of the first batch; None if no samples can be seen.
        one_device_s: forward and backward of that part as a whole on one device, without the optimizer.
        plans: with the chain that each splits.
    """

    num_ranks: int
    num_pipelines: int
    balance: Any
    link: LinkCost
    num_samples: int | None = None
    one_device_s: float = 0.0
    plans: list[tuple[NamedChain, Plan]] = field(default_factory=list)


def plan(
    schedule: str,
    costs: StageCosts,
    bounds: Sequence[tuple[int, int]],
    *,
    parameter_bytes: Sequence[int],
    held: Sequence[HeldBytes],
    one_device_s: float,
) -> Plan:
    """Predicts a step.

    Args:
        schedule: that of ``costs``.
        costs: of the layers, for the micro-batches of this plan.
        bounds: the layers ``[start, stop)`` of each stage.
        parameter_bytes: of each layer.
        held: what each rank holds, by position.
        one_device_s: what one device takes for the same batch.
    """
    stages = list(enumerate(bounds))
    forward_s = [costs.forward_s(stage, *bound) for stage, bound in stages]
    backward_s = [costs.backward_s(stage, *bound) for stage, bound in stages]
    cuts_s = [costs.cut_s(stop) for _, stop in bounds[:-1]]
    return Plan(
        schedule,
        costs.num_micro_batches,
        tuple(
            PlannedStage(
                _rank(stage, costs.num_ranks),
                (start, stop),
                sum(parameter_bytes[start:stop]),
                forward_s[stage],
                backward_s[stage],
                costs.cut_s(start) + costs.cut_s(stop),
            )
            for stage, (start, stop) in stages
        ),
        tuple(timelines(costs.orders, forward_s, backward_s, cuts_s)),
        tuple(
            PlannedMemory(_rank(position, costs.num_ranks), held[position], *activations)
            for position, activations in enumerate(costs.rank_activations_bytes(bounds))
        ),
        one_device_s,
    )


def one_device_s(parts: Sequence[PartCost]) -> float:
    """Seconds that one device takes for all parts of a step."""
    return sum(part.forward_s + part.backward_s for part in parts)


def timelines(
    orders: Sequence[Sequence[Work]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: Sequence[float],
) -> list[Timeline]:
    """Of each rank; arguments as for :func:`~.schedule_orders.work_times`. What a pass sends follows it as a "send"."""
    times = work_times(orders, forward_s, backward_s, transfer_s)
    return [tuple(part for work in order for part in _intervals(work, *times[work], transfer_s)) for order in orders]


def _intervals(work: Work, start_s: float, end_s: float, transfer_s: Sequence[float]) -> Iterator[Interval]:
    sending_s = 0.0
    if work.kind == "forward" and work.stage < len(transfer_s):
        sending_s = transfer_s[work.stage]
    elif work.kind == "backward" and work.stage > 0:
        sending_s = transfer_s[work.stage - 1]
    yield Interval(work.kind, work.stage, work.micro_batch, start_s, end_s - sending_s)
    if sending_s:
        yield Interval("send", work.stage, work.micro_batch, end_s - sending_s, end_s)


def _rank(stage: int, num_ranks: int) -> int:
    return num_ranks - 1 - stage % num_ranks
