"""Splits of a chain: exact, and refused if there is none."""

import itertools
import random
from typing import Any

import pytest

from lightning_multigpu.planning.pipelines.balance import balanced_bounds, bounds_of_counts, cheapest_bounds


def test_equal_layers_are_spread_evenly() -> None:
    assert balanced_bounds([1] * 8, 4) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert balanced_bounds([4, 0, 0, 0], 2) == [(0, 1), (1, 4)]


def test_counts() -> None:
    assert bounds_of_counts([1, 3, 2], 6, 3) == [(0, 1), (1, 4), (4, 6)]


@pytest.mark.parametrize(
    ("counts", "words"),
    [([1, 2], "2 entries for 3 stages"), ([1, 0, 5], "every stage needs 1 layer"), ([1, 1, 1], "adds up to 3")],
)
def test_wrong_counts_are_named(counts: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bounds_of_counts(counts, 6, 3)


def test_no_other_cut_is_better_for_the_slowest_stage() -> None:
    dice = random.Random(4)
    for _ in range(100):
        num_stages = dice.randint(1, 4)
        num_layers = dice.randint(num_stages, 9)
        pairs = itertools.combinations(range(num_layers + 1), 2)
        cost = {bound: dice.choice([0, 1, 2, 5, 9]) + dice.random() for bound in pairs}

        def of(stage: int, start: int, stop: int, cost: Any = cost) -> float:
            return float(cost[start, stop] * (1 + stage % 3))

        found = cheapest_bounds(of, num_layers, num_stages)
        cuts = itertools.combinations(range(1, num_layers), num_stages - 1)
        every = [list(itertools.pairwise((0, *each, num_layers))) for each in cuts]
        assert found in every
        slowest = [max(of(stage, *bound) for stage, bound in enumerate(bounds)) for bounds in [found, *every]]
        assert slowest[0] == min(slowest)
