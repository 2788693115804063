"""What a compression says that it saved and lost."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_multigpu.communication.compression.compression_statistics import CompressionStatistics


def _step(statistics: CompressionStatistics, values: torch.Tensor, lost: torch.Tensor) -> bool:
    had_square = statistics.square(values)
    statistics.add_loss(had_square, lost)
    statistics.end_step()
    return had_square is not None


def test_losses_are_counted_in_the_first_step_and_every_16th_from_there() -> None:
    statistics = CompressionStatistics()
    assert math.isnan(statistics.relative_error)
    counted = [_step(statistics, torch.full((4,), 2.0), torch.full((4,), float(step))) for step in range(33)]
    assert [step for step, counts in enumerate(counted) if counts] == [0, 16, 32]
    assert statistics.relative_error == pytest.approx(math.sqrt((0 + 16**2 + 32**2) / (3 * 2.0**2)))


def test_steps_that_are_not_finite_do_not_count() -> None:
    statistics = CompressionStatistics()
    for had, lost in ((math.nan, 1.0), (1.0, math.inf)):
        statistics.add_loss(statistics.square(torch.tensor([had])), torch.tensor([lost]))
    statistics.add_loss(statistics.square(torch.tensor([2.0])), torch.tensor([1.0]))
    assert statistics.relative_error == 0.5
