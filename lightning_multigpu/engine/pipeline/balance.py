"""Where to cut a chain of layers into stages: pure functions of the layers' costs.

A cut before layer c means that layer c - 1 ends one stage and layer c begins the next::

    layers    0   1   2 | 3   4 | 5   6          cuts = (3, 5)
    stage         0         1       2
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def balanced_cuts(
    costs: Sequence[float], num_stages: int, *, transfers: Sequence[float] | None = None
) -> tuple[int, ...]:
    """The cuts that minimise the cost of the most expensive stage, found exactly by dynamic programming.

    Among equally good splits the one whose stages differ least is taken: it minimises the sum of squares, too.

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

    def cost(start: int, stop: int) -> float:
        return total[stop] - total[start] + (sent[stop - 1] if stop < num_layers else 0.0)

    # best[stop]: (most expensive stage, sum of squares, cuts) of the first layers up to ``stop`` in the stages so far.
    best = {stop: (cost(0, stop), cost(0, stop) ** 2, ()) for stop in range(1, num_layers + 1)}
    for stage in range(1, num_stages):
        previous: dict[int, tuple[float, float, tuple[int, ...]]] = best  # type: ignore[assignment]
        best = {
            stop: min(
                (
                    max(previous[start][0], cost(start, stop)),
                    previous[start][1] + cost(start, stop) ** 2,
                    (*previous[start][2], start),
                )
                for start in range(stage, stop)
            )  # type: ignore[misc]
            for stop in range(stage + 1, num_layers + 1)
        }
    return best[num_layers][2]


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
