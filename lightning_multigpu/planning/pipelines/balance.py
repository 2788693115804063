"""Balance: splits a chain of layers into stages by the layers' costs.

::

    layers    0   1   2 | 3   4 | 5   6          bounds = [(0, 3), (3, 5), (5, 7)]
    stage         0         1       2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

Bounds = list[tuple[int, int]]
"""The layers ``[start, stop)`` of each stage."""

StageCost = Callable[[int, int, int], float]
"""The cost of a stage with the layers ``[start, stop)``: called with the stage, ``start`` and ``stop``."""


def balanced_bounds(costs: Sequence[float], num_stages: int, before: float = 0.0, after: float = 0.0) -> Bounds:
    """The split that minimises the cost of the most expensive stage; see :func:`cheapest_bounds`.

    ``costs`` are those of each layer, 0 or more, in any unit; ``before`` and ``after`` what the first and the last
    stage have besides.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    total = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        ends = (0 if start else before) + (after if stop == len(costs) else 0)
        return total[stop] - total[start] + ends

    return cheapest_bounds(cost, len(costs), num_stages)


def cheapest_bounds(cost: StageCost, num_layers: int, num_stages: int) -> Bounds:
    """The split that minimises the cost of the most expensive stage.

    Dynamic programming over the end of each stage finds the exact minimum. Among equally good splits it takes the one
    with the smallest sum of squared costs, in which the stages differ least.

    Args:
        cost: the cost of a stage, 0 or more.
        num_layers, num_stages: layers of the chain, and stages; every stage gets at least one layer.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages={num_stages}: a pipeline has 1 stage or more")
    if num_layers < num_stages:
        raise ValueError(
            f"{num_stages} stages for a chain of {num_layers} layers: every stage needs a layer; use {num_layers} or "
            "fewer devices, or name a longer chain by module=, or submodules to cut at by split_points="
        )
    # best[stop]: (most expensive stage, sum of squares, cuts) for the layers before ``stop`` in the stages so far.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {
        stop: (cost(0, 0, stop), cost(0, 0, stop) ** 2, ()) for stop in range(1, num_layers + 1)
    }
    for stage in range(1, num_stages):
        previous = best
        best = {}
        for stop in range(stage + 1, num_layers + 1):
            candidates = []
            for start in range(stage, stop):
                slowest, squares, cuts = previous[start]
                here = cost(stage, start, stop)
                candidates.append((max(slowest, here), squares + here**2, (*cuts, start)))
            best[stop] = min(candidates)
    return _bounds_of(best[num_layers][2], num_layers)


def bounds_of_counts(counts: Sequence[int], num_layers: int, num_stages: int) -> Bounds:
    """The split that gives stage s ``counts[s]`` layers.

    Raises:
        ValueError: there is not one count of 1 or more for each stage, or the counts do not add up to the layers.
    """
    if len(counts) != num_stages:
        raise ValueError(f"balance={list(counts)} has {len(counts)} entries for {num_stages} stages; pass one a stage")
    if min(counts) < 1:
        raise ValueError(f"balance={list(counts)}: every stage needs 1 layer or more")
    if sum(counts) != num_layers:
        raise ValueError(
            f"balance={list(counts)} adds up to {sum(counts)} layers, and the chain has {num_layers}; pass counts that "
            f"add up to {num_layers}"
        )
    return _bounds_of(tuple(accumulate(counts))[:-1], num_layers)


def _bounds_of(cuts: Sequence[int], num_layers: int) -> Bounds:
    return list(pairwise((0, *cuts, num_layers)))


def layers_text(start: int, stop: int) -> str:
    """The layers ``[start, stop)``, for people."""
    return f"layers {start} to {stop - 1}" if stop - start > 1 else f"layer {start}"
