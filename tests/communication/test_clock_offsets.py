"""Clocks of ranks that differ."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from lightning_multigpu.communication.clock_offsets import clock_offsets
from tests.world import World, init_group

AHEAD_S = {0: 3.0, 1: -5.0, 2: 0.0, 3: 1e6}


def _offsets() -> list[tuple[float, float]]:
    init_group()

    def gather(moment: float) -> list[float]:
        found: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(found, moment)
        return found

    return clock_offsets(gather, lambda: time.perf_counter() + AHEAD_S[dist.get_rank()])


def test_an_offset_is_found_within_its_error(world4: World) -> None:
    results = world4.run(_offsets)
    assert all(result == results[0] for result in results)
    assert results[0][0] == (0.0, 0.0)
    for rank, (offset_s, error_s) in enumerate(results[0]):
        assert abs(offset_s - (AHEAD_S[rank] - AHEAD_S[0])) <= error_s + 1e-9
        assert error_s < 1.0


def test_the_tightest_bounds_of_all_rounds_count() -> None:
    """Rank 1 is 10 s ahead; rank 0 leaves the first round late, and rank 1 the second."""
    mine = iter([0.0, 4.0, 5.0, 6.0])
    told = iter([[0.0, 10.0], [5.0, 15.0], [4.0, 11.0], [6.0, 19.0]])
    offsets = clock_offsets(lambda moment: next(told), lambda: next(mine), rounds=2)
    # Bounds: 10 - 4 = 6 to 11 - 0 = 11, then 15 - 6 = 9 to 19 - 5 = 14.
    assert offsets == [(0.0, 0.0), (pytest.approx(10.0), pytest.approx(1.0))]
