"""Predictions of a pipeline, compared with figures worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_multigpu.planning.pipelines.pipeline_prediction import PipelinePlan, median_costs, plan
from lightning_multigpu.planning.pipelines.stage_costs import PartCost, StageCosts
from lightning_multigpu.planning.pipelines.timeline import HeldBytes

BOUNDS = [(0, 1), (1, 2)]


def planned(schedule: str, parts: list[PartCost], bounds: list[tuple[int, int]] = BOUNDS, **given: Any) -> PipelinePlan:
    """Two ranks; the one with the first stage holds 100 bytes of parameters and the other 40."""
    costs = StageCosts(
        parts,
        [0] * (len(parts) - 2),
        schedule=schedule,
        num_ranks=2,
        stages_per_rank=len(bounds) // 2,
        num_micro_batches=given.get("num_micro_batches", 3),
    )
    return plan(
        schedule,
        costs,
        bounds,
        parameter_bytes=[10 * (1 + layer) for layer in range(len(parts) - 2)],
        held=[HeldBytes(100, 0, 0), HeldBytes(40, 40, 0)],
        one_device_s=30.0,
        steps_s=given.get("steps_s", ()),
    )


def layers(*seconds: tuple[float, float]) -> list[PartCost]:
    """Nothing before and behind; outputs of 5 bytes."""
    return [PartCost(), *(PartCost(forward_s, backward_s, 5) for forward_s, backward_s in seconds), PartCost()]


def test_stages_are_those_of_training() -> None:
    """The first and the last stage compute what is before and after the layers."""
    bounds = [(0, 1), (1, 3), (3, 4), (4, 5)]
    parts = [PartCost(0.5, 0.25), *(PartCost(1, 2, 5) for _ in range(5)), PartCost(7, 8)]
    found = planned("interleaved", parts, bounds, num_micro_batches=2)
    assert [stage.parameters_bytes for stage in found.stages] == [10, 50, 40, 50]
    assert [stage.forward_s for stage in found.stages] == [1.5, 2, 1, 8]
    assert [stage.backward_s for stage in found.stages] == [2.25, 4, 2, 10]
    assert [stage.output_bytes for stage in found.stages] == [5, 5, 5, 5]


@pytest.mark.parametrize(("schedule", "in_flight"), [("gpipe", 3), ("1f1b", 2)])
def test_memory_of_the_rank_that_needs_most(schedule: str, in_flight: int) -> None:
    parts = [PartCost(saved_bytes=1), PartCost(0, 0, 5, 60), PartCost(0, 1, 5, 10), PartCost(saved_bytes=2)]
    found = planned(schedule, parts)
    last_rank, rank_zero = found.memory
    assert last_rank.activations_bytes == in_flight * 61
    assert rank_zero.activations_bytes == (3 if schedule == "gpipe" else 1) * (5 + 10 + 2)
    assert found.largest_memory is last_rank
    assert (last_rank.total, rank_zero.total) == (100 + in_flight * 61, 80 + rank_zero.activations_bytes)


def test_memory_of_all_stages_of_a_rank() -> None:
    """Two micro-batches are in memory, but of the last stage one, whose backward follows at once.

    One layer of a rank runs again at a time.
    """
    bounds = [(0, 1), (1, 3), (3, 4), (4, 5)]
    inner = [PartCost(0, 0, 5, 10, 0, again) for again in (70, 10, 30, 80, 20)]
    parts = [PartCost(saved_bytes=1), *inner, PartCost(saved_bytes=2)]
    last_rank, rank_zero = planned("interleaved", parts, bounds, num_micro_batches=2).memory
    assert last_rank.activations_bytes == 2 * (1 + 10) + 2 * (5 + 10)
    assert rank_zero.activations_bytes == 2 * (5 + 20) + (5 + 10 + 2)
    assert (last_rank.recomputed_bytes, rank_zero.recomputed_bytes) == (80, 30)
    assert last_rank.total == 100 + last_rank.activations_bytes + 80


def test_rounds_give_medians_and_their_range() -> None:
    rounds = [layers((s, 2 * s), (s, 2 * s)) for s in (1.0, 1.1, 1.0, 9.0, 1.0)]
    found = planned("1f1b", median_costs(rounds), steps_s=[12.0, 13.2, 12.0, 108.0, 12.0])
    assert [(stage.forward_s, stage.backward_s) for stage in found.stages] == [(1.0, 2.0)] * 2
    assert found.spread == pytest.approx((108 - 12) / 12)
