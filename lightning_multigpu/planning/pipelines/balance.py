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

_Split = tuple[tuple[float, ...], tuple[int, ...]]
"""The load of each rank, and the positions of the cuts, for the stages so far."""

_KEPT_SPLITS = 64
"""The most partial splits that are kept for each number of layers, if a rank has several stages."""


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


def cheapest_bounds(cost: StageCost, num_layers: int, num_stages: int, *, num_ranks: int | None = None) -> Bounds:
    """The split that minimises the cost of the most expensive rank.

    With one stage on each rank, dynamic programming over the end of each stage finds the exact minimum. Among equally
    good splits it takes the one with the smallest sum of squared costs, in which the stages differ least.

    With several stages on each rank, the best cost of a stage depends on the other stages of its rank. So for each
    number of stages and layers all partial splits are kept, unless another one is better on every rank. That is exact
    for up to 64 partial splits; of more, the best 64 are kept. The result is never worse than the minimum over single
    stages.

    Args:
        cost: the cost of a stage, 0 or more.
        num_layers, num_stages: layers of the chain, and stages; every stage gets at least one layer.
        num_ranks: P, with the stages p, P + p... on rank p; by default as many as stages.

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
    bounds = _by_stage(cost, num_layers, num_stages)
    if num_ranks is None or num_ranks >= num_stages:
        return bounds
    loads = [0.0] * num_ranks
    for stage, (start, stop) in enumerate(bounds):
        loads[stage % num_ranks] += cost(stage, start, stop)
    return _by_rank(cost, num_layers, num_stages, (tuple(loads), tuple(start for start, _ in bounds[1:])))


def _by_stage(cost: StageCost, num_layers: int, num_stages: int) -> Bounds:
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


def _by_rank(cost: StageCost, num_layers: int, num_stages: int, known: _Split) -> Bounds:
    """The best of the ``known`` split and of the splits that are built stage by stage."""
    loads, _ = known
    num_ranks, limit = len(loads), max(loads)
    splits: dict[int, list[_Split]] = {0: [((0.0,) * num_ranks, ())]}
    for stage in range(num_stages):
        rank = stage % num_ranks
        last = num_layers - (num_stages - stage - 1)
        found: dict[int, list[_Split]] = {}
        for start, beginnings in splits.items():
            for stop in range(start + 1, last + 1) if stage < num_stages - 1 else [num_layers]:
                here = cost(stage, start, stop)
                cuts_end = (start,) if stage else ()
                found.setdefault(stop, []).extend(
                    ((*loads[:rank], loads[rank] + here, *loads[rank + 1 :]), (*cuts, *cuts_end))
                    for loads, cuts in beginnings
                    if loads[rank] + here <= limit
                )
        splits = {stop: _undominated(candidates) for stop, candidates in found.items()}
    _, cuts = min([*splits.get(num_layers, []), known], key=_order)
    return _bounds_of(cuts, num_layers)


def _undominated(candidates: list[_Split]) -> list[_Split]:
    kept: list[_Split] = []
    for loads, cuts in sorted(candidates, key=_order):
        if not any(all(a <= b for a, b in zip(other, loads, strict=True)) for other, _ in kept):
            kept.append((loads, cuts))
            if len(kept) == _KEPT_SPLITS:
                break
    return kept


def _order(split: _Split) -> tuple[float, float]:
    loads, _ = split
    return max(loads), sum(load * load for load in loads)


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
