"""Where to cut a chain of layers into stages: pure functions of the layers' costs.

A cut before layer c means that layer c - 1 ends one stage and layer c begins the next::

    layers    0   1   2 | 3   4 | 5   6          cuts = (3, 5)
    stage         0         1       2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

StageCost = Callable[[int, int, int], float]
"""What a stage costs that has the layers ``[start, stop)``: called with the stage, ``start`` and ``stop``."""

_KEPT_SPLITS = 64
"""Beginnings of a split that are followed up for each number of layers, where a rank has several stages."""


def balanced_cuts(
    costs: Sequence[float], num_stages: int, *, transfers: Sequence[float] | None = None
) -> tuple[int, ...]:
    """The cuts that minimise the cost of the most expensive stage; see :func:`cheapest_cuts`.

    Args:
        costs: of each layer; any unit, 0 or more.
        num_stages: P; every stage gets at least one layer.
        transfers: of each layer, what it costs the stage to send that layer's output on if it is the stage's last
            one, in the unit of ``costs``; the last layer's is not used.

    Returns:
        P - 1 increasing positions in the chain.

    Raises:
        ValueError: there are fewer layers than stages, a cost is negative, or lengths differ.
    """
    num_layers = len(costs)
    check_stages(num_layers, num_stages)
    sent = list(transfers) if transfers is not None else [0.0] * num_layers
    if len(sent) != num_layers:
        raise ValueError(f"transfers={len(sent)} values for {num_layers} layers; pass one for each layer")
    if min(*costs, *sent, 0) < 0:
        raise ValueError(f"costs and transfers must be 0 or more; the smallest is {min(*costs, *sent)}")
    total = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        return total[stop] - total[start] + (sent[stop - 1] if stop < num_layers else 0.0)

    return cheapest_cuts(cost, num_layers, num_stages)


def cheapest_cuts(
    cost: StageCost, num_layers: int, num_stages: int, *, num_ranks: int | None = None
) -> tuple[int, ...]:
    """The cuts that minimise the cost of the most expensive rank.

    With a stage a rank they are found exactly, by dynamic programming over the end of each stage. Among equally good
    splits the one whose stages differ least is taken: it minimises the sum of squares, too.

    With several stages a rank what a stage may cost depends on what the rank's other stages do. Then all beginnings
    of a split are followed up of which none is better for every rank, which is exact as long as they are 64 at most
    for each number of stages and layers; of more, the best 64 are kept. The result is never worse than that of
    looking at single stages.

    Args:
        cost: of a stage, 0 or more.
        num_layers, num_stages: of the chain; every stage gets at least one layer.
        num_ranks: P, with the stages p, P + p... on rank p; by default each stage has a rank.

    Returns:
        ``num_stages - 1`` increasing positions in the chain.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    check_stages(num_layers, num_stages)
    cuts = _cuts_by_stage(cost, num_layers, num_stages)
    if num_ranks is None or num_ranks >= num_stages:
        return cuts
    loads = [0.0] * num_ranks
    for stage, (start, stop) in enumerate(stage_bounds(cuts, num_layers)):
        loads[stage % num_ranks] += cost(stage, start, stop)
    return _cuts_by_rank(cost, num_layers, num_stages, (tuple(loads), cuts))


def _cuts_by_stage(cost: StageCost, num_layers: int, num_stages: int) -> tuple[int, ...]:
    # best[stop]: (most expensive stage, sum of squares, cuts) of the first layers up to ``stop`` in the stages so far.
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
    return best[num_layers][2]


_Split = tuple[tuple[float, ...], tuple[int, ...]]
"""What each rank has to do so far, and the cuts."""


def _cuts_by_rank(cost: StageCost, num_layers: int, num_stages: int, known: _Split) -> tuple[int, ...]:
    """The best of the ``known`` split of all layers and of those that are built up stage by stage."""
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
    return min([*splits.get(num_layers, []), known], key=_order)[1]


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


def cuts_of_counts(counts: Sequence[int], num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The cuts that give stage s ``counts[s]`` layers.

    Raises:
        ValueError: there is not one count of 1 or more for each stage, or they do not add up to the layers.
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
    return tuple(accumulate(counts))[:-1]


def stage_bounds(cuts: Sequence[int], num_layers: int) -> list[tuple[int, int]]:
    """The layers ``[start, stop)`` of each stage."""
    return list(pairwise((0, *cuts, num_layers)))


def check_stages(num_layers: int, num_stages: int) -> None:
    """There is a layer for every stage.

    Raises:
        ValueError: there is not.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages={num_stages}: a pipeline has 1 stage or more")
    if num_layers < num_stages:
        raise ValueError(
            f"{num_stages} stages for a chain of {num_layers} layers: every stage needs a layer; use {num_layers} or "
            "fewer devices, or name a longer chain by module="
        )
