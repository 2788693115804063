"""Losses of micro-batches add up to that of their batch, or it is said why not."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_multigpu.engine.pipeline.stages.losses import (
    combined_loss,
    disagreement,
    relative_difference,
    relative_tolerance,
)
from lightning_multigpu.engine.pipeline.stages.micro_batches import weights_of


def test_a_micro_batch_that_counts_for_nothing_may_be_nan() -> None:
    losses = [torch.tensor(2.0), torch.tensor(math.nan), torch.tensor(4.0)]
    assert float(combined_loss(losses, [0.75, 0.0, 0.25])) == 2.5
    assert math.isnan(combined_loss(losses, [0.5, 0.25, 0.25]))
    assert relative_difference(2.5, [2.0, math.nan, 4.0], [0.75, 0.0, 0.25]) == 0


def test_differences_are_relative_to_what_is_added_up() -> None:
    assert relative_difference(1.0, [1.0, 2.0], [0.5, 0.5]) == pytest.approx(1 / 3)
    assert relative_difference(1e-9, [1.0, -1.0], [0.5, 0.5]) == pytest.approx(1e-9)
    assert relative_difference(0.0, [0.0, 0.0], [0.5, 0.5]) == 0
    assert math.isnan(relative_difference(0.0, [0.0, math.nan], [0.5, 0.5]))


def test_rounding_is_that_of_the_coarsest_type() -> None:
    double, single, half = torch.float64, torch.float32, torch.bfloat16
    assert relative_tolerance([double], "cpu") == 1e-8
    assert relative_tolerance([double, single], "cpu") == 1e-5
    assert relative_tolerance([single, double], "cuda") == 1e-3
    assert relative_tolerance([half, single], "cpu") == relative_tolerance([torch.float16], "cuda") == 2e-2


def test_what_does_not_add_up_is_said_with_the_fix() -> None:
    means = [0.5, 0.25, 0.25]
    samples = [2, 1, 1]
    assert disagreement(2.0, [1.0, 2.0, 4.0], means, samples, given="'mean'", rtol=1e-8) is None
    summed = disagreement(7.0, [1.0, 2.0, 4.0], means, samples, given="'mean'", rtol=1e-8)
    assert summed is not None
    assert "is 7 as a whole, and 2 in 3 micro-batches under loss_reduction='mean'" in summed
    assert "relative difference 0.71, rounding explains 1e-08" in summed
    assert "With loss_reduction='sum' both agree" in summed
    averaged = disagreement(2.0, [1.0, 2.0, 4.0], [1.0] * 3, samples, given="'sum'", rtol=1e-8)
    assert averaged is not None
    assert "With loss_reduction='mean' both agree" in averaged
    neither = disagreement(3.0, [1.0, 2.0, 4.0], means, samples, given="'mean'", rtol=1e-8)
    assert neither is not None
    assert "targets that are not ignored" in neither
    assert "num_micro_batches=1" in neither
    assert disagreement(2.0, [1.0, math.nan, 4.0], means, samples, given="'mean'", rtol=1e-8) is not None


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_weights_that_cannot_be_are_named(weight: float) -> None:
    with pytest.raises(ValueError, match=f"loss_reduction returned {weight} for a micro-batch.*0 or more"):
        weights_of([torch.zeros(1), torch.zeros(1)], lambda part: weight)
