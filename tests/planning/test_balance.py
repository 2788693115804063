"""Splits of a chain: exact, and refused if there is none."""

from __future__ import annotations

import itertools
import random

import pytest

from lightning_multigpu.planning.pipelines.balance import Bounds, balanced_bounds, bounds_of_counts, cheapest_bounds


def every_split(num_layers: int, num_stages: int) -> list[Bounds]:
    return [
        list(itertools.pairwise((0, *cuts, num_layers)))
        for cuts in itertools.combinations(range(1, num_layers), num_stages - 1)
    ]


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


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="3 stages for a chain of 2 layers"):
        balanced_bounds([1, 1], 3)


def slowest_rank(cost: dict[tuple[int, int], float], bounds: Bounds, num_ranks: int) -> float:
    loads = [0.0] * num_ranks
    for stage, bound in enumerate(bounds):
        loads[stage % num_ranks] += cost[bound] * (1 + stage % 3)
    return max(loads)


@pytest.mark.parametrize("several", [False, True])
def test_no_other_cut_is_better_for_the_slowest_rank(several: bool) -> None:
    dice = random.Random(4)
    for _ in range(150):
        num_ranks = dice.randint(1, 3)
        num_stages = num_ranks * (dice.randint(2, 3) if several else 1)
        num_layers = dice.randint(num_stages, 9)
        cost = {bound: dice.choice([0, 1, 2, 5, 9]) + dice.random() for bound in pairs(num_layers)}
        found = cheapest_bounds(
            lambda stage, start, stop, cost=cost: cost[start, stop] * (1 + stage % 3),
            num_layers,
            num_stages,
            num_ranks=num_ranks,
        )
        every = every_split(num_layers, num_stages)
        assert found in every
        assert slowest_rank(cost, found, num_ranks) == pytest.approx(
            min(slowest_rank(cost, bounds, num_ranks) for bounds in every), rel=1e-12
        )


def pairs(num_layers: int) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(num_layers + 1), 2))


def test_long_chains_are_cut_in_bounded_work() -> None:
    asked: list[int] = []

    def cost(stage: int, start: int, stop: int) -> float:
        asked.append(stage)
        return sum((7 * layer) % 5 for layer in range(start, stop))

    bounds = cheapest_bounds(cost, 32, 8, num_ranks=4)
    loads = [0.0] * 4
    for stage, bound in enumerate(bounds):
        loads[stage % 4] += cost(stage, *bound)
    assert max(loads) <= 1.1 * sum(loads) / 4
    assert len(asked) < 20_000
