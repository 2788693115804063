"""Stage costs: predicted time and memory of the stages of a split, and of a pipeline's step, from costs of its layers.

The parts of a step are numbered as they run: part 0 is before the chain, part 1 + i is layer i, and part n + 1 is after
the last of n layers. The first stage runs part 0, and the last stage part n + 1. The other stages run part 0 too,
forward only and with placeholders, and messages travel between stages: neither is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from lightning_multigpu.planning.numbers import ms, size
from lightning_multigpu.planning.pipelines.balance import (
    Bounds,
    balanced_bounds,
    bounds_of_counts,
    cheapest_bounds,
    layers_text,
)
from lightning_multigpu.planning.pipelines.schedule_order import in_flight, schedule_orders, step_time
from lightning_multigpu.planning.pipelines.timeline import NOTHING, HeldBytes, summed

MeasuredBalance = Literal["time", "memory"]


@dataclass(frozen=True)
class PartCost:
    """The cost of a part of the step for one micro-batch.

    Attributes:
        forward_s, backward_s: seconds.
        output_bytes: bytes of its output.
        saved_bytes: bytes saved for backward, without parameters and without tensors that an earlier part has saved.
        input_bytes: the bytes of its input in ``saved_bytes``.
        recomputed_bytes: bytes saved in addition to its input during its backward pass, if the part is recomputed; not
            in ``saved_bytes``.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    output_bytes: int = 0
    saved_bytes: int = 0
    input_bytes: int = 0
    recomputed_bytes: int = 0


class StageCosts:
    """Predicts the costs of a split, and finds the cheapest split.

    Args:
        parts: costs of the n + 2 parts of the step.
        held_bytes: bytes of each part's parameters, gradients and optimizer states, where not all ranks hold them.
        schedule, num_ranks, stages_per_rank, num_micro_batches: as in training.

    Attributes:
        orders: the passes of each rank.

    Raises:
        ValueError: the lengths do not fit.
    """

    def __init__(
        self,
        parts: Sequence[PartCost],
        held_bytes: Sequence[int],
        *,
        schedule: str,
        num_ranks: int,
        stages_per_rank: int,
        num_micro_batches: int,
    ) -> None:
        if len(parts) != len(held_bytes):
            raise ValueError(f"{len(parts)} parts, and bytes of {len(held_bytes)}; pass as many")
        self.num_layers, self.num_micro_batches = len(parts) - 2, num_micro_batches
        self.num_ranks, self.num_stages = num_ranks, num_ranks * stages_per_rank
        self.parts, self._held = tuple(parts), held_bytes
        self.orders = schedule_orders(schedule, num_ranks, stages_per_rank, num_micro_batches)
        self._in_flight = {stage: count for order in self.orders for stage, count in in_flight(order).items()}

    def _of(self, start: int, stop: int) -> slice:
        """The parts of a stage with the layers ``[start, stop)``, and at the ends those before and after them."""
        return slice(1 + start if start else 0, 1 + stop if stop < self.num_layers else None)

    def forward_s(self, start: int, stop: int) -> float:
        """Seconds of a micro-batch's forward pass in a stage with the layers ``[start, stop)``."""
        return sum(part.forward_s for part in self.parts[self._of(start, stop)])

    def backward_s(self, start: int, stop: int) -> float:
        """Seconds of a micro-batch's backward pass in a stage with the layers ``[start, stop)``."""
        return sum(part.backward_s for part in self.parts[self._of(start, stop)])

    def time_s(self, stage: int, start: int, stop: int) -> float:
        """Seconds of a micro-batch, forward and backward."""
        return self.forward_s(start, stop) + self.backward_s(start, stop)

    def memory_bytes(self, stage: int, start: int, stop: int) -> int:
        """Bytes of the stage's parts, and of the tensors saved for backward."""
        saved = self.activations_bytes(stage, start, stop) + self.recomputed_bytes(start, stop)
        return sum(self._held[self._of(start, stop)]) + saved

    def activations_bytes(self, stage: int, start: int, stop: int) -> int:
        """Bytes that the stage's layers save for backward, when its rank has the most micro-batches in flight."""
        return self._in_flight[stage] * self._saved_bytes(start, stop)

    def _saved_bytes(self, start: int, stop: int) -> int:
        """Bytes that a stage saves for one micro-batch."""
        received_bytes = max(0, self.parts[start].output_bytes - self.parts[1 + start].input_bytes) if start else 0
        return received_bytes + sum(part.saved_bytes for part in self.parts[self._of(start, stop)])

    def recomputed_bytes(self, start: int, stop: int) -> int:
        """Bytes saved in addition while one recomputed layer runs backward."""
        return max(part.recomputed_bytes for part in self.parts[1 + start : 1 + stop])

    def bounds(self, balance: MeasuredBalance) -> Bounds:
        """The split that minimises the cost of the most expensive stage."""
        cost = self.time_s if balance == "time" else self.memory_bytes
        return cheapest_bounds(cost, self.num_layers, self.num_stages)

    def step_s(self, bounds: Bounds) -> float:
        """Predicted seconds of a batch, forward and backward, without messages and the optimizer."""
        passes_s = [self.forward_s(*bound) for bound in bounds], [self.backward_s(*bound) for bound in bounds]
        return step_time(self.orders, *passes_s, [0.0] * (len(bounds) - 1))

    def largest_bytes(self, bounds: Bounds) -> int:
        needed = [saved + recomputed for saved, recomputed in self.rank_activations_bytes(bounds)]
        for stage, (start, stop) in enumerate(bounds):
            needed[stage % self.num_ranks] += sum(self._held[self._of(start, stop)])
        return max(needed)

    def rank_activations_bytes(self, bounds: Bounds) -> list[tuple[int, int]]:
        """The most bytes that each rank saves for backward, and that a recomputed layer adds; by position."""
        found = []
        for order in self.orders:
            sizes = {stage: self._saved_bytes(*bounds[stage]) for stage in {work.stage for work in order}}
            saved = sum(count * sizes[stage] for stage, count in in_flight(order, sizes).items())
            found.append((saved, max(self.recomputed_bytes(*bounds[stage]) for stage in sizes)))
        return found

    def describe(self, bounds: Bounds, ranks: Sequence[int]) -> str:
        """The stages and their predicted costs, one line for each; ``ranks`` by position."""
        lines = []
        for stage, (start, stop) in enumerate(bounds):
            lines.append(
                f"  stage {stage} on rank {ranks[stage % len(ranks)]}: {layers_text(start, stop)}, "
                f"forward {ms(self.forward_s(start, stop))}, "
                f"backward {ms(self.backward_s(start, stop))}, "
                f"{size(self.memory_bytes(stage, start, stop))}"
            )
        return "\n".join(lines)


class PlannedStage(NamedTuple):
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

    stages: tuple[PlannedStage, ...]
    memory: tuple[PlannedMemory, ...]
    one_device_s: float


@dataclass(frozen=True, kw_only=True)
class MeasuredParts:
    """The costs of the n + 2 parts of a step on ``samples`` samples."""

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
            [own.total for own in self.held],
            schedule=schedule,
            num_ranks=num_ranks,
            stages_per_rank=stages_per_rank,
            num_micro_batches=num_micro_batches,
        )
        bounds = self._bounds(costs, balance)
        of_stages = [self.held[1 + start : 1 + stop] for start, stop in bounds]
        own = [[self.everywhere, *(h for s in of_stages[rank::num_ranks] for h in s)] for rank in range(num_ranks)]
        own[0].append(self.held[0])
        own[(len(bounds) - 1) % num_ranks].append(self.held[-1])
        again_s = sum(self.parts_of(samples)[1 + layer].forward_s for layer in self.recompute)
        return PipelinePlan(
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
        return balanced_bounds(layers, costs.num_stages, before, after)


def _between(a: PartCost, b: PartCost, share: float) -> PartCost:
    """The costs at ``share`` of the way from ``a`` to ``b``, which are 0 or more."""
    values = {}
    for each in fields(PartCost):
        first, last = getattr(a, each.name), getattr(b, each.name)
        value = max(0.0, first + share * (last - first))
        values[each.name] = value if each.name.endswith("_s") else round(value)
    return PartCost(**values)
