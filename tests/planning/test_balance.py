"""Cuts of a chain: exact, and refused where there are none."""

from __future__ import annotations

import itertools
import random

import pytest

from lightning_multigpu.planning.balance import balanced_cuts, cheapest_cuts, cuts_of_counts, stage_bounds


def slowest(costs: list[float], transfers: list[float], cuts: tuple[int, ...]) -> float:
    bounds = stage_bounds(cuts, len(costs))
    return max(sum(costs[a:b]) + (transfers[b - 1] if b < len(costs) else 0) for a, b in bounds)


def test_no_other_cut_is_better() -> None:
    dice = random.Random(3)
    for _ in range(200):
        num_layers = dice.randint(1, 8)
        num_stages = dice.randint(1, num_layers)
        costs = [dice.choice([0, 1, 1, 2, 5, 9]) + 0.0 for _ in range(num_layers)]
        transfers = [dice.choice([0, 0, 1, 4]) + 0.0 for _ in range(num_layers)]
        found = balanced_cuts(costs, num_stages, transfers=transfers)
        every = itertools.combinations(range(1, num_layers), num_stages - 1)
        assert list(found) == sorted(set(found))
        assert len(found) == num_stages - 1
        assert slowest(costs, transfers, found) == min(slowest(costs, transfers, cuts) for cuts in every)


def test_equal_layers_are_dealt_out_evenly() -> None:
    assert balanced_cuts([1] * 8, 4) == (2, 4, 6)
    assert balanced_cuts([4, 0, 0, 0], 2) == (1,)


def test_a_costly_transfer_moves_the_cut() -> None:
    assert balanced_cuts([2, 2, 2, 2], 2) == (2,)
    assert balanced_cuts([2, 2, 2, 2], 2, transfers=[0, 9, 0, 0]) in {(1,), (3,)}


def test_counts() -> None:
    assert cuts_of_counts([1, 3, 2], 6, 3) == (1, 4)
    assert stage_bounds((1, 4), 6) == [(0, 1), (1, 4), (4, 6)]


@pytest.mark.parametrize(
    ("counts", "words"),
    [([1, 2], "2 entries for 3 stages"), ([1, 0, 5], "every stage needs 1 layer"), ([1, 1, 1], "adds up to 3")],
)
def test_wrong_counts_are_named(counts: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cuts_of_counts(counts, 6, 3)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="3 stages for a chain of 2 layers"):
        balanced_cuts([1, 1], 3)


def slowest_rank(cost: dict[tuple[int, int], float], cuts: tuple[int, ...], num_layers: int, num_ranks: int) -> float:
    loads = [0.0] * num_ranks
    for stage, bound in enumerate(stage_bounds(cuts, num_layers)):
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
        found = cheapest_cuts(
            lambda stage, start, stop, cost=cost: cost[start, stop] * (1 + stage % 3),
            num_layers,
            num_stages,
            num_ranks=num_ranks,
        )
        every = itertools.combinations(range(1, num_layers), num_stages - 1)
        assert len(found) == num_stages - 1
        assert slowest_rank(cost, found, num_layers, num_ranks) == pytest.approx(
            min(slowest_rank(cost, cuts, num_layers, num_ranks) for cuts in every), rel=1e-12
        )


def pairs(num_layers: int) -> list[tuple[int, int]]:
    return list(itertools.combinations(range(num_layers + 1), 2))


def test_two_small_stages_make_up_for_a_large_one() -> None:
    # Stage by stage 8 | 1 1 1 1 1 | ... would do; rank by rank the large layer's rank gets little else.
    costs = [1, 8, 1, 1, 1, 1, 4, 3]
    total = [sum(costs[:stop]) for stop in range(9)]
    cuts = cheapest_cuts(lambda stage, start, stop: total[stop] - total[start], 8, 4, num_ranks=2)
    loads = [0, 0]
    for stage, (start, stop) in enumerate(stage_bounds(cuts, 8)):
        loads[stage % 2] += total[stop] - total[start]
    assert loads == [10, 10]


def test_long_chains_are_cut_in_bounded_work() -> None:
    asked: list[int] = []

    def cost(stage: int, start: int, stop: int) -> float:
        asked.append(stage)
        return sum((7 * layer) % 5 for layer in range(start, stop))

    cuts = cheapest_cuts(cost, 32, 8, num_ranks=4)
    loads = [0.0] * 4
    for stage, bound in enumerate(stage_bounds(cuts, 32)):
        loads[stage % 4] += cost(stage, *bound)
    assert max(loads) <= 1.1 * sum(loads) / 4
    assert len(asked) < 20_000
