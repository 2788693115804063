"""Pipeline prediction: time and memory of a pipeline's step, from layers that were measured on one device.

::

    costs of the layers, by samples -> split -> seconds of each stage's passes, bytes of its output
                                             -> tensors that each rank holds -> memory
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from lightning_multigpu.planning.pipelines.balance import Bounds, bounds_of_counts, cheapest_bounds
from lightning_multigpu.planning.pipelines.stage_costs import PartCost, StageCosts
from lightning_multigpu.planning.pipelines.timeline import NOTHING, HeldBytes, summed


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
    """

    schedule: str
    num_micro_batches: int
    stages: tuple[PlannedStage, ...]
    memory: tuple[PlannedMemory, ...]
    one_device_s: float

    @property
    def largest_memory(self) -> PlannedMemory:
        return max(self.memory, key=lambda rank: rank.total)


@dataclass(frozen=True, kw_only=True)
class MeasuredParts:
    """The costs of the n + 2 parts of a step on ``samples`` samples, see :mod:`.stage_costs`."""

    samples: int
    parts: Sequence[PartCost]


@dataclass(frozen=True, kw_only=True)
class ChainFigures:
    """A chain of n layers that a pipeline can cut, measured on one device.

    Attributes:
        name: of the part of the module.
        measured: on a small and on a whole batch; one alone where that has one sample. Between, costs are straight.
        held: bytes of the parameters of each of the n + 2 parts; tied ones before and behind the layers count twice.
        everywhere: of parameters that all ranks hold.
        recompute: layers that backward computes again.
        balance: as in :class:`.PipelineStrategy`.
        num_stages: the only number of stages, of a module that is cut at given points; 0 for any.
    """

    name: str
    measured: Sequence[MeasuredParts]
    held: Sequence[HeldBytes]
    everywhere: HeldBytes = NOTHING
    recompute: Sequence[int] = ()
    balance: Any = "parameters"
    num_stages: int = 0

    def parts_of(self, samples: float) -> list[PartCost]:
        """The parts' costs for a micro-batch."""
        small, whole = self.measured[0], self.measured[-1]
        if small.samples == whole.samples:
            share, nothing = samples / whole.samples, [PartCost()] * len(whole.parts)
            return [_between(a, b, share) for a, b in zip(nothing, whole.parts, strict=True)]
        share = (samples - small.samples) / (whole.samples - small.samples)
        return [_between(a, b, share) for a, b in zip(small.parts, whole.parts, strict=True)]

    def plan(
        self, schedule: str, num_ranks: int, stages_per_rank: int, num_micro_batches: int, samples: float, balance: Any
    ) -> PipelinePlan:
        """Predicts a step of ``samples``; arguments are as in :class:`.PipelineStrategy`.

        Raises:
            ValueError: the layers cannot have so many stages, or not under this schedule.
        """
        if self.num_stages not in (0, num_ranks * stages_per_rank):
            raise ValueError(
                f"split_points makes {self.num_stages} stages, and {num_ranks} ranks with {stages_per_rank} each have "
                f"{num_ranks * stages_per_rank}"
            )
        if self.recompute and schedule == "zero_bubble":
            raise ValueError("activation_checkpointing is not possible under schedule='zero_bubble'")
        costs = StageCosts(
            self.parts_of(samples / num_micro_batches),
            [own.total for own in self.held[1:-1]],
            schedule=schedule,
            num_ranks=num_ranks,
            stages_per_rank=stages_per_rank,
            num_micro_batches=num_micro_batches,
            end_bytes=(self.held[0].total, self.held[-1].total),
        )
        bounds = self._bounds(costs, balance)
        of_stages = [self.held[1 + start : 1 + stop] for start, stop in bounds]
        own = [[self.everywhere, *(h for s in of_stages[rank::num_ranks] for h in s)] for rank in range(num_ranks)]
        own[0].append(self.held[0])
        own[(len(bounds) - 1) % num_ranks].append(self.held[-1])
        again_s = sum(self.parts_of(samples)[1 + layer].forward_s for layer in self.recompute)
        return PipelinePlan(
            schedule=schedule,
            num_micro_batches=num_micro_batches,
            stages=tuple(
                PlannedStage(
                    sum(held.parameters_bytes for held in of_stage),
                    costs.forward_s(*bound),
                    costs.backward_s(*bound),
                    costs.parts[bound[1]].output_bytes,
                )
                for of_stage, bound in zip(of_stages, bounds, strict=True)
            ),
            memory=tuple(
                PlannedMemory(**vars(summed(held)), activations_bytes=activations, recomputed_bytes=recomputed)
                for held, (activations, recomputed) in zip(own, costs.rank_activations_bytes(bounds), strict=True)
            ),
            one_device_s=sum(part.forward_s + part.backward_s for part in self.parts_of(samples)) - again_s,
        )

    def _bounds(self, costs: StageCosts, balance: Any) -> Bounds:
        if balance in ("time", "memory"):
            return costs.bounds(balance)
        if not isinstance(balance, str):
            return bounds_of_counts(balance, costs.num_layers, costs.num_stages)
        before, *layers, after = (held.parameters_bytes for held in self.held)
        if not before and not after and len(set(layers)) == 1 and len(layers) >= costs.num_stages:
            cuts = [stage * len(layers) // costs.num_stages for stage in range(costs.num_stages + 1)]
            return [*pairwise(cuts)]

        def size_bytes(stage: int, start: int, stop: int) -> int:
            ends = (0 if start else before) + (after if stop == costs.num_layers else 0)
            return sum(layers[start:stop]) + ends

        return cheapest_bounds(size_bytes, costs.num_layers, costs.num_stages)


def _between(a: PartCost, b: PartCost, share: float) -> PartCost:
    """The costs at ``share`` of the way from ``a`` to ``b``, which are 0 or more."""
    values = {}
    for each in fields(PartCost):
        first, last = getattr(a, each.name), getattr(b, each.name)
        value = max(0.0, first + share * (last - first))
        values[each.name] = value if each.name.endswith("_s") else round(value)
    return PartCost(**values)
