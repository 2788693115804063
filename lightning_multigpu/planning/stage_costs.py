"""What the stages of a split cost in time and in memory, from what its layers were measured to cost.

The parts of a step are numbered as they run: 0 is what comes before the chain, 1 + i layer i, and n + 1 what comes
behind the last of n layers. Every stage runs part 0 forward, since the step begins on every stage; its gradients are
wanted on the first stage only. Part n + 1 is run by the last stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from lightning_multigpu.planning.balance import cheapest_cuts, stage_bounds
from lightning_multigpu.planning.schedule_order import Work, in_flight, schedule_orders, step_time

MeasuredBalance = Literal["time", "memory"]


@dataclass(frozen=True)
class PartCost:
    """What a part of the step costs for one micro-batch.

    Attributes:
        forward_s, backward_s: seconds.
        output_bytes: what it hands on.
        saved_bytes: what it keeps for backward, besides parameters and what an earlier part keeps already.
        input_bytes: of its input, among these.
        recomputed_bytes: what it keeps beyond its input while its own backward pass runs, if it runs again for that;
            nothing of it counts as saved.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    output_bytes: int = 0
    saved_bytes: int = 0
    input_bytes: int = 0
    recomputed_bytes: int = 0


@dataclass(frozen=True)
class LinkCost:
    """What a message between two neighbours costs: ``latency_s``, and ``s_per_byte`` for each byte."""

    latency_s: float
    s_per_byte: float

    def seconds(self, size_bytes: int) -> float:
        return self.latency_s + size_bytes * self.s_per_byte


class StageCosts:
    """Predicts what a split costs, and finds the cheapest one.

    Args:
        parts: costs of the n + 2 parts of the step.
        layer_bytes: of each layer, what its parameters, their gradients and optimizer states take.
        link: between neighbouring ranks.
        schedule, num_ranks, stages_per_rank, num_micro_batches: as in training.

    Attributes:
        orders: the work of each rank.

    Raises:
        ValueError: the lengths do not fit.
    """

    def __init__(
        self,
        parts: Sequence[PartCost],
        layer_bytes: Sequence[int],
        link: LinkCost,
        *,
        schedule: str,
        num_ranks: int,
        stages_per_rank: int,
        num_micro_batches: int,
    ) -> None:
        if len(parts) != len(layer_bytes) + 2:
            raise ValueError(f"{len(parts)} parts for {len(layer_bytes)} layers; pass {len(layer_bytes) + 2}")
        self.num_layers = len(layer_bytes)
        self.num_ranks = num_ranks
        self.num_stages = num_ranks * stages_per_rank
        self.num_micro_batches = num_micro_batches
        self.parts = tuple(parts)
        self._link = link
        self.orders: list[list[Work]] = schedule_orders(schedule, num_ranks, stages_per_rank, num_micro_batches)
        self._in_flight = {stage: count for order in self.orders for stage, count in in_flight(order).items()}
        layers = self.parts[1:-1]
        self._forward = [0.0, *accumulate(part.forward_s for part in layers)]
        self._backward = [0.0, *accumulate(part.backward_s for part in layers)]
        self._saved = [0, *accumulate(part.saved_bytes for part in layers)]
        self._held = [0, *accumulate(layer_bytes)]

    def forward_s(self, stage: int, start: int, stop: int) -> float:
        """Of a micro-batch, in a stage with the layers ``[start, stop)``."""
        behind = self.parts[-1].forward_s if stop == self.num_layers else 0.0
        return self.parts[0].forward_s + self._forward[stop] - self._forward[start] + behind

    def backward_s(self, stage: int, start: int, stop: int) -> float:
        """Of a micro-batch, in a stage with the layers ``[start, stop)``."""
        outside = (self.parts[0].backward_s if start == 0 else 0.0) + (
            self.parts[-1].backward_s if stop == self.num_layers else 0.0
        )
        return self._backward[stop] - self._backward[start] + outside

    def cut_s(self, cut: int) -> float:
        """Of what a micro-batch sends over a cut, one way; gradients take as long as what they belong to."""
        return self._link.seconds(self.parts[cut].output_bytes) if 0 < cut < self.num_layers else 0.0

    def time_s(self, stage: int, start: int, stop: int) -> float:
        """Of a micro-batch, forward and backward, with the output and the gradient that the stage sends."""
        compute = self.forward_s(stage, start, stop) + self.backward_s(stage, start, stop)
        return compute + self.cut_s(start) + self.cut_s(stop)

    def memory_bytes(self, stage: int, start: int, stop: int) -> int:
        """Of the stage's layers and of what they keep for backward.

        Parameters outside of the chain are not counted: every stage has them.
        """
        kept = self.activations_bytes(stage, start, stop) + self.recomputed_bytes(start, stop)
        return self._held[stop] - self._held[start] + kept

    def activations_bytes(self, stage: int, start: int, stop: int) -> int:
        """What the stage's layers keep for backward, when its rank has most micro-batches in flight."""
        return self._in_flight[stage] * self._saved_bytes(start, stop)

    def _saved_bytes(self, start: int, stop: int) -> int:
        """What a stage keeps of a micro-batch."""
        saved = self._saved[stop] - self._saved[start]
        received_bytes = max(0, self.parts[start].output_bytes - self.parts[1 + start].input_bytes)
        saved += self.parts[0].saved_bytes if start == 0 else received_bytes
        saved += self.parts[-1].saved_bytes if stop == self.num_layers else 0
        return saved

    def recomputed_bytes(self, start: int, stop: int) -> int:
        """What is kept in addition while the backward pass of one layer, which has run again for it, uses it."""
        return max(part.recomputed_bytes for part in self.parts[1 + start : 1 + stop])

    def bounds(self, balance: MeasuredBalance) -> list[tuple[int, int]]:
        """The layers ``[start, stop)`` of each stage, so that the most expensive rank costs as little as possible."""
        cost = self.time_s if balance == "time" else self.memory_bytes
        return stage_bounds(
            cheapest_cuts(cost, self.num_layers, self.num_stages, num_ranks=self.num_ranks), self.num_layers
        )

    def step_s(self, bounds: Sequence[tuple[int, int]]) -> float:
        """Predicted seconds of a batch, forward and backward, without the optimizer."""
        stages = list(enumerate(bounds))
        return step_time(
            self.orders,
            [self.forward_s(stage, *bound) for stage, bound in stages],
            [self.backward_s(stage, *bound) for stage, bound in stages],
            [self.cut_s(stop) for _, stop in bounds[:-1]],
        )

    def fullest_bytes(self, bounds: Sequence[tuple[int, int]]) -> int:
        """What the rank needs that needs most."""
        needed = [kept + again for kept, again in self.rank_activations_bytes(bounds)]
        for stage, (start, stop) in enumerate(bounds):
            needed[stage % self.num_ranks] += self._held[stop] - self._held[start]
        return max(needed)

    def rank_activations_bytes(self, bounds: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Of each rank, by position, what it keeps for backward at most, and what a layer that runs again adds."""
        found = []
        for order in self.orders:
            sizes = {stage: self._saved_bytes(*bounds[stage]) for stage in {work.stage for work in order}}
            kept = sum(count * sizes[stage] for stage, count in in_flight(order, sizes).items())
            found.append((kept, max(self.recomputed_bytes(*bounds[stage]) for stage in sizes)))
        return found

    def describe(self, bounds: Sequence[tuple[int, int]], ranks: Sequence[int]) -> str:
        """The stages and what they are predicted to cost, a line each; ``ranks`` by position."""
        lines = []
        for stage, (start, stop) in enumerate(bounds):
            layers = f"layers {start} to {stop - 1}" if stop - start > 1 else f"layer {start}"
            lines.append(
                f"  stage {stage} on rank {ranks[stage % len(ranks)]}: {layers}, "
                f"forward {1e3 * self.forward_s(stage, start, stop):.3g} ms, "
                f"backward {1e3 * self.backward_s(stage, start, stop):.3g} ms, "
                f"transfer {1e3 * (self.cut_s(start) + self.cut_s(stop)):.3g} ms, "
                f"{self.memory_bytes(stage, start, stop) / 1e6:.3g} MB"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of parameters, of their gradients, and of the states that optimizers will keep of them."""

    parameters: int
    gradients: int
    optimizers: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizers
