"""Differences between the clocks of ranks."""

from __future__ import annotations

from collections.abc import Callable


def clock_offsets(
    gather: Callable[[float], list[float]], now: Callable[[], float], *, rounds: int = 16
) -> list[tuple[float, float]]:
    """Each rank's clock minus the clock of rank 0, and the largest possible error, in seconds. A collective.

    No rank leaves an all-gather before every rank has entered it. So, in the time of rank 0, rank r enters before rank
    0 leaves, and rank 0 enters before rank r leaves. That bounds the offset of rank r from below and from above; the
    middle of the tightest bounds of all rounds is taken (Cristian 1989, "Probabilistic clock synchronization").

    Args:
        gather: an all-gather of one value per rank, in rank order; no rank returns before all have called it.
        now: this rank's clock, in seconds.
        rounds: number of all-gathers; each may tighten the bounds.

    Returns:
        In rank order, on every rank.
    """
    entered, left = [], []
    for _ in range(rounds):
        entered.append(gather(now()))
        left.append(now())
    # The times of leaving are gathered afterwards: one row for each round, one column for each rank.
    all_left = [gather(moment) for moment in left]
    offsets = []
    for rank in range(len(entered[0])):
        lower = max(came[rank] - went[0] for came, went in zip(entered, all_left, strict=True))
        upper = min(went[rank] - came[0] for came, went in zip(entered, all_left, strict=True))
        offsets.append(((lower + upper) / 2, (upper - lower) / 2) if rank else (0.0, 0.0))
    return offsets
