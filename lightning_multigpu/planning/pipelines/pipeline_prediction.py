"""Pipeline prediction: time and memory of a step, from the costs of the layers on one device.

::

    costs of the layers -> split -> seconds of each stage's passes, bytes of its output
                                 -> tensors that each rank holds -> memory
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from lightning_multigpu.planning.pipelines.balance import Bounds
from lightning_multigpu.planning.pipelines.stage_costs import PartCost, StageCosts
from lightning_multigpu.planning.pipelines.timeline import HeldBytes


@dataclass(frozen=True)
class PlannedStage:
    """The predicted costs of a stage for one micro-batch."""

    parameters_bytes: int
    forward_s: float
    backward_s: float
    output_bytes: int


@dataclass(frozen=True)
class PlannedMemory(HeldBytes):
    """Bytes that a rank of the pipeline needs.

    Attributes:
        activations_bytes: the most bytes saved for backward at a time.
        recomputed_bytes: bytes saved in addition while one recomputed layer runs backward.
    """

    activations_bytes: int
    recomputed_bytes: int

    @property
    def total(self) -> int:
        return super().total + self.activations_bytes + self.recomputed_bytes


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """The predicted run of a pipeline.

    Attributes:
        memory: each rank's memory, by position: the last rank's first.
        one_device_s: seconds of the same batch on one device.
        spread: (slowest - fastest) / median step of several rounds of measurements.
    """

    schedule: str
    num_micro_batches: int
    stages: tuple[PlannedStage, ...]
    memory: tuple[PlannedMemory, ...]
    one_device_s: float
    spread: float = 0.0

    def times(self, factor: float) -> PipelinePlan:
        """The run on a device that computes for ``factor`` times as long."""
        stages = [replace(s, forward_s=factor * s.forward_s, backward_s=factor * s.backward_s) for s in self.stages]
        return replace(self, stages=tuple(stages), one_device_s=factor * self.one_device_s)

    @property
    def largest_memory(self) -> PlannedMemory:
        return max(self.memory, key=lambda rank: rank.total)


def plan(
    schedule: str,
    costs: StageCosts,
    bounds: Bounds,
    *,
    parameter_bytes: Sequence[int],
    held: Sequence[HeldBytes],
    one_device_s: float,
    steps_s: Sequence[float] = (),
) -> PipelinePlan:
    """Predicts a step; arguments that are not here are as in :class:`PipelinePlan`.

    Args:
        schedule: the schedule of ``costs``.
        costs: the layers' costs for the micro-batches of this plan.
        bounds: the layers ``[start, stop)`` of each stage.
        parameter_bytes: bytes of each layer's parameters.
        held: bytes that each rank holds, by position.
        steps_s: predicted seconds of a step from each round of measurements.
    """
    return PipelinePlan(
        schedule=schedule,
        num_micro_batches=costs.num_micro_batches,
        stages=tuple(
            PlannedStage(
                sum(parameter_bytes[start:stop]),
                costs.forward_s(start, stop),
                costs.backward_s(start, stop),
                costs.parts[stop].output_bytes,
            )
            for start, stop in bounds
        ),
        memory=tuple(
            PlannedMemory(own.parameters_bytes, own.gradients_bytes, own.optimizer_bytes, *activations)
            for own, activations in zip(held, costs.rank_activations_bytes(bounds), strict=True)
        ),
        one_device_s=one_device_s,
        spread=(max(steps_s) - min(steps_s)) / median(steps_s) if steps_s else 0.0,
    )


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
