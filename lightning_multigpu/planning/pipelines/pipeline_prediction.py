"""Pipeline prediction: time and memory of a step, from the costs of the layers on one device.

::

    costs of the layers -> split -> begin and end of each pass -> step time, bubble, picture
                                 -> tensors that each rank holds -> memory
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from lightning_multigpu.planning.pipelines.balance import Bounds
from lightning_multigpu.planning.pipelines.stage_costs import LinkCost, PartCost, StageCosts
from lightning_multigpu.planning.pipelines.timeline import BUSY, HeldBytes, Timeline, bubble, predicted, span

LARGEST_SPREAD = 0.25
"""With a larger spread of one setting's steps in different rounds, no setting is recommended."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage and its predicted costs for one micro-batch.

    Attributes:
        rank: the stage's rank in the pipeline, whose last rank has the first stage; the first of several that split the
            stage's layers.
        layers: the layers ``[start, stop)``.
        transfer_s: seconds of sending its output, and the gradient of its input.
    """

    rank: int
    layers: tuple[int, int]
    parameters_bytes: int
    forward_s: float
    backward_s: float
    transfer_s: float
    output_bytes: int = 0


@dataclass(frozen=True)
class PlannedMemory(HeldBytes):
    """Bytes that a rank of the pipeline needs.

    Attributes:
        activations_bytes: the most bytes saved for backward at a time.
        recomputed_bytes: bytes saved in addition while one recomputed layer runs backward.
    """

    rank: int
    activations_bytes: int
    recomputed_bytes: int

    @property
    def total(self) -> int:
        return super().total + self.activations_bytes + self.recomputed_bytes


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """The predicted run of a pipeline.

    Attributes:
        module: name of the split module.
        description: the split module, as text.
        timelines: each rank's timeline, by position: the last rank's first.
        memory: each rank's memory, by position.
        one_device_s: seconds of the same batch on one device.
        tensor_parallel_size: ranks that split each layer of a stage.
        rounds: the plans from each round of measurements; this plan has their median figures.
    """

    module: str
    description: str
    schedule: str
    num_micro_batches: int
    stages: tuple[PlannedStage, ...]
    timelines: tuple[Timeline, ...]
    memory: tuple[PlannedMemory, ...]
    one_device_s: float
    tensor_parallel_size: int = 1
    rounds: tuple[PipelinePlan, ...] = ()

    @property
    def step_s(self) -> float:
        """Seconds of a batch, forward and backward, without the optimizer."""
        start_s, end_s = span(self.timelines)
        return end_s - start_s

    @property
    def bubble(self) -> float:
        """1 - busy / wall, over all ranks; sending is not busy."""
        return bubble(self.timelines)

    @property
    def relative_throughput(self) -> float:
        """Samples per second, relative to one device; at most the number of ranks if layers are not split.

        One device may run the whole batch at once, or its micro-batches one after the other: the faster one counts.
        """
        busy_s = sum(work.seconds for line in self.timelines for work in line if work.kind in BUSY)
        if self.tensor_parallel_size > 1:  # the stages' times do not give one device's
            return self.one_device_s / self.step_s
        return min(self.one_device_s, busy_s) / self.step_s

    @property
    def relative_throughput_range(self) -> tuple[float, float]:
        """The smallest and the largest of the rounds."""
        found = [self.relative_throughput, *(one.relative_throughput for one in self.rounds)]
        return min(found), max(found)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median step of the rounds."""
        steps = [one.step_s for one in self.rounds] or [self.step_s]
        return (max(steps) - min(steps)) / median(steps)

    def is_slower_than(self, other: PipelinePlan) -> bool:
        """Whether its step is longer in every round; the plans of a round were measured under the same load."""
        return all(mine.step_s > its.step_s for mine, its in zip(self.rounds, other.rounds, strict=True))

    @property
    def largest_memory(self) -> PlannedMemory:
        return max(self.memory, key=lambda rank: rank.total)


@dataclass
class PipelinePlans:
    """Plans of one pipeline.

    Attributes:
        tensor_parallel_size: ranks that split each stage's layers.
        split: the split layers, as text; empty if layers are not split.
        num_pipelines: number of pipelines; each has its own batches.
        link: the link between neighbouring ranks.
        num_samples: samples of a pipeline's first batch; None if unknown.
        one_device_s: seconds of that batch, forward and backward, on one device without micro-batches and optimizer;
            the median of the rounds.
        waiting: the share of the measurement in which other processes had the core.
        plans: one for each schedule and number of micro-batches.
    """

    num_ranks: int
    num_pipelines: int
    balance: Any
    link: LinkCost
    num_samples: int | None = None
    tensor_parallel_size: int = 1
    split: str = ""
    one_device_s: float = 0.0
    waiting: float = 0.0
    plans: list[PipelinePlan] = field(default_factory=list)

    @property
    def fastest(self) -> PipelinePlan:
        return min(self.plans, key=lambda plan: plan.step_s)

    @property
    def alike(self) -> list[PipelinePlan]:
        """The plans that may be as fast as the fastest: in at least one round they were."""
        fastest = self.fastest
        return [plan for plan in self.plans if plan is not fastest and not plan.is_slower_than(fastest)]

    @property
    def is_too_noisy(self) -> bool:
        """Whether the rounds differ too much for a choice."""
        return max(plan.spread for plan in self.plans) > LARGEST_SPREAD


def plan(
    schedule: str,
    costs: StageCosts,
    bounds: Bounds,
    *,
    module: str,
    description: str,
    parameter_bytes: Sequence[int],
    held: Sequence[HeldBytes],
    one_device_s: float,
    tensor_parallel_size: int = 1,
    rounds: Sequence[PipelinePlan] = (),
) -> PipelinePlan:
    """Predicts a step; arguments that are not here are as in :class:`PipelinePlan`.

    Args:
        schedule: the schedule of ``costs``.
        costs: the layers' costs for the micro-batches of this plan.
        bounds: the layers ``[start, stop)`` of each stage.
        parameter_bytes: bytes of each layer's parameters.
        held: bytes that each rank holds, by position.
    """
    forward_s, backward_s, cuts_s = costs.pass_times(bounds)
    return PipelinePlan(
        module=module,
        description=description,
        schedule=schedule,
        num_micro_batches=costs.num_micro_batches,
        stages=tuple(
            PlannedStage(
                _rank(stage, costs.num_ranks) * tensor_parallel_size,
                (start, stop),
                sum(parameter_bytes[start:stop]),
                forward_s[stage],
                backward_s[stage],
                costs.cut_s(start) + costs.cut_s(stop),
                costs.parts[stop].output_bytes,
            )
            for stage, (start, stop) in enumerate(bounds)
        ),
        timelines=tuple(predicted(costs.orders, forward_s, backward_s, cuts_s)),
        memory=tuple(
            PlannedMemory(
                own.parameters_bytes,
                own.gradients_bytes,
                own.optimizer_bytes,
                _rank(position, costs.num_ranks) * tensor_parallel_size,
                *activations,
            )
            for position, (own, activations) in enumerate(zip(held, costs.rank_activations_bytes(bounds), strict=True))
        ),
        one_device_s=one_device_s,
        tensor_parallel_size=tensor_parallel_size,
        rounds=tuple(rounds),
    )


def one_device_s(parts: Sequence[PartCost]) -> float:
    """Seconds of all parts of a step on one device."""
    return sum(part.forward_s + part.backward_s for part in parts)


def median_costs(rounds: Sequence[Sequence[PartCost]]) -> list[PartCost]:
    """Each part's costs with the median times of several rounds; sizes are the same in all rounds."""
    return [
        replace(
            same[0],
            forward_s=median(part.forward_s for part in same),
            backward_s=median(part.backward_s for part in same),
        )
        for same in zip(*rounds, strict=True)
    ]


def _rank(stage: int, num_ranks: int) -> int:
    return num_ranks - 1 - stage % num_ranks
