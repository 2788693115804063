"""Stage costs: predicted time and memory of the stages of a split, from measured costs of its layers.

The parts of a step are numbered as they run: part 0 is before the chain, part 1 + i is layer i, and part n + 1 is after
the last of n layers. The first stage runs part 0, and the last stage part n + 1. The other stages run part 0 too,
forward only and with placeholders, and messages travel between stages: neither is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from lightning_multigpu.planning.numbers import ms, size
from lightning_multigpu.planning.pipelines.balance import Bounds, cheapest_bounds, layers_text
from lightning_multigpu.planning.pipelines.schedule_order import in_flight, schedule_orders, step_time

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
        layer_bytes: bytes of each layer's parameters, gradients and optimizer states.
        schedule, num_ranks, stages_per_rank, num_micro_batches: as in training.
        end_bytes: bytes of parameters outside of the layers, with gradients and optimizer states, that only the first
            stage's rank holds, and that only the last stage's rank holds.

    Attributes:
        orders: the passes of each rank.

    Raises:
        ValueError: the lengths do not fit.
    """

    def __init__(
        self,
        parts: Sequence[PartCost],
        layer_bytes: Sequence[int],
        *,
        schedule: str,
        num_ranks: int,
        stages_per_rank: int,
        num_micro_batches: int,
        end_bytes: tuple[int, int] = (0, 0),
    ) -> None:
        if len(parts) != len(layer_bytes) + 2:
            raise ValueError(f"{len(parts)} parts for {len(layer_bytes)} layers; pass {len(layer_bytes) + 2}")
        self.num_layers = len(layer_bytes)
        self.num_ranks = num_ranks
        self.num_stages = num_ranks * stages_per_rank
        self.num_micro_batches = num_micro_batches
        self.parts = tuple(parts)
        self.orders = schedule_orders(schedule, num_ranks, stages_per_rank, num_micro_batches)
        self._in_flight = {stage: count for order in self.orders for stage, count in in_flight(order).items()}
        layers = self.parts[1:-1]
        self._forward = [0.0, *accumulate(part.forward_s for part in layers)]
        self._backward = [0.0, *accumulate(part.backward_s for part in layers)]
        self._saved = [0, *accumulate(part.saved_bytes for part in layers)]
        self._held = [0, *accumulate(layer_bytes)]
        self._end_bytes = end_bytes

    def forward_s(self, start: int, stop: int) -> float:
        """Seconds of a micro-batch's forward pass in a stage with the layers ``[start, stop)``."""
        return self._forward[stop] - self._forward[start] + self._at_ends("forward_s", start, stop)

    def backward_s(self, start: int, stop: int) -> float:
        """Seconds of a micro-batch's backward pass in a stage with the layers ``[start, stop)``."""
        return self._backward[stop] - self._backward[start] + self._at_ends("backward_s", start, stop)

    def _at_ends(self, figure: str, start: int, stop: int) -> float:
        """A figure of the parts before and after the layers, where the stage runs them."""
        ends = ([] if start else [self.parts[0]]) + ([self.parts[-1]] if stop == self.num_layers else [])
        return float(sum(getattr(part, figure) for part in ends))

    def time_s(self, stage: int, start: int, stop: int) -> float:
        """Seconds of a micro-batch, forward and backward."""
        return self.forward_s(start, stop) + self.backward_s(start, stop)

    def memory_bytes(self, stage: int, start: int, stop: int) -> int:
        """Bytes of the stage's layers, of the modules before or after them, and of the tensors saved for backward.

        Parameters that every rank holds are not counted.
        """
        saved = self.activations_bytes(stage, start, stop) + self.recomputed_bytes(start, stop)
        return self._held_bytes(start, stop) + saved

    def _held_bytes(self, start: int, stop: int) -> int:
        before, after = self._end_bytes
        ends = (0 if start else before) + (after if stop == self.num_layers else 0)
        return self._held[stop] - self._held[start] + ends

    def activations_bytes(self, stage: int, start: int, stop: int) -> int:
        """Bytes that the stage's layers save for backward, when its rank has the most micro-batches in flight."""
        return self._in_flight[stage] * self._saved_bytes(start, stop)

    def _saved_bytes(self, start: int, stop: int) -> int:
        """Bytes that a stage saves for one micro-batch."""
        saved = self._saved[stop] - self._saved[start]
        received_bytes = max(0, self.parts[start].output_bytes - self.parts[1 + start].input_bytes) if start else 0
        return saved + received_bytes + int(self._at_ends("saved_bytes", start, stop))

    def recomputed_bytes(self, start: int, stop: int) -> int:
        """Bytes saved in addition while one recomputed layer runs backward."""
        return max(part.recomputed_bytes for part in self.parts[1 + start : 1 + stop])

    def bounds(self, balance: MeasuredBalance) -> Bounds:
        """The split that minimises the cost of the most expensive rank."""
        cost = self.time_s if balance == "time" else self.memory_bytes
        return cheapest_bounds(cost, self.num_layers, self.num_stages, num_ranks=self.num_ranks)

    def step_s(self, bounds: Bounds) -> float:
        """Predicted seconds of a batch, forward and backward, without messages and the optimizer."""
        passes_s = [self.forward_s(*bound) for bound in bounds], [self.backward_s(*bound) for bound in bounds]
        return step_time(self.orders, *passes_s, [0.0] * (len(bounds) - 1))

    def largest_bytes(self, bounds: Bounds) -> int:
        needed = [saved + recomputed for saved, recomputed in self.rank_activations_bytes(bounds)]
        for stage, (start, stop) in enumerate(bounds):
            needed[stage % self.num_ranks] += self._held_bytes(start, stop)
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
