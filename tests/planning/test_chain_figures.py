"""Predictions of a pipeline, compared with figures worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_multigpu.planning.pipelines.stage_costs import ChainFigures, MeasuredParts, PartCost, PipelinePlan
from lightning_multigpu.planning.pipelines.timeline import HeldBytes


def planned(
    schedule: str, parts: list[PartCost], balance: Any, *, stages_per_rank: int = 1, num_micro_batches: int = 3
) -> PipelinePlan:
    """Two ranks; layers of 10, 20, 30 ... bytes, 5 before them, 7 behind them and 1 everywhere."""
    sizes = [5, *(10 * (1 + layer) for layer in range(len(parts) - 2)), 7]
    chain = ChainFigures(
        name="layers",
        measured=[MeasuredParts(samples=samples, parts=parts) for samples in (1, 8)],
        held=[HeldBytes(size, size, 2 * size) for size in sizes],
        everywhere=HeldBytes(1, 0, 0),
    )
    return chain.plan(schedule, 2, stages_per_rank, num_micro_batches, 8, balance)


def test_stages_are_those_of_training() -> None:
    """The first and the last stage compute what is before and after the layers."""
    parts = [PartCost(0.5, 0.25), *(PartCost(1, 2, 5) for _ in range(5)), PartCost(7, 8)]
    found = planned("interleaved", parts, [1, 2, 1, 1], stages_per_rank=2, num_micro_batches=2)
    assert [stage.parameters_bytes for stage in found.stages] == [10, 50, 40, 50]
    assert [stage.forward_s for stage in found.stages] == [1.5, 2, 1, 8]
    assert [stage.backward_s for stage in found.stages] == [2.25, 4, 2, 10]
    assert [stage.output_bytes for stage in found.stages] == [5, 5, 5, 5]
    last_rank, rank_zero = found.memory
    assert (last_rank.parameters_bytes, last_rank.gradients_bytes) == (1 + 5 + 10 + 40, 5 + 10 + 40)
    assert (rank_zero.parameters_bytes, rank_zero.optimizer_bytes) == (1 + 50 + 50 + 7, 2 * (50 + 50 + 7))
    assert found.one_device_s == 0.75 + 5 * 3 + 15


@pytest.mark.parametrize(
    ("samples", "forward_s", "saved_bytes"), [(1, 1.0, 10), (4.5, 4.5, 45), (8, 8.0, 80), (16, 16.0, 160)]
)
def test_costs_follow_the_samples_of_a_micro_batch(samples: float, forward_s: float, saved_bytes: int) -> None:
    def measured(samples: int) -> MeasuredParts:
        part = PartCost(1.0 * samples, 2.0 * samples, 4, 10 * samples)
        return MeasuredParts(samples=samples, parts=[PartCost(), part, PartCost()])

    for chosen in ([1, 8], [8]):
        chain = ChainFigures(name="layers", measured=[*map(measured, chosen)], held=[HeldBytes(0, 0, 0)] * 3)
        part = chain.parts_of(samples)[1]
        assert (part.forward_s, part.saved_bytes) == (pytest.approx(forward_s), saved_bytes)


def test_stages_that_cannot_be_are_refused() -> None:
    parts = [PartCost()] * 4
    chain = ChainFigures(
        name="layers", measured=[MeasuredParts(samples=8, parts=parts)], held=[HeldBytes(0, 0, 0)] * 4,
        recompute=[1], num_stages=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match="split_points makes 4 stages, and 2 ranks with 1 each have 2"):
        chain.plan("gpipe", 2, 1, 4, 8, "parameters")
    with pytest.raises(ValueError, match="activation_checkpointing is not possible under schedule='zero_bubble'"):
        chain.plan("zero_bubble", 2, 2, 4, 8, "parameters")
