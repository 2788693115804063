"""Cuts of a chain: exact, and refused where there are none."""

from __future__ import annotations

import itertools
import random

import pytest

from lightning_multigpu.engine.pipeline.balance import balanced_cuts, cuts_of_counts, stage_bounds


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
