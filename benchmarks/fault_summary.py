"""Summary of many outcomes of fault runs in a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.fault_job import Outcome


def summary(outcomes: Sequence[Outcome], weights: float | None = None) -> dict[str, dict[str, Any]]:
    """Counts by kind of fault and for all of them, and seconds from the fault to the end.

    Args:
        outcomes: of the runs.
        weights: of a run without faults, which controls have to come to.
    """
    kinds = sorted({outcome.kind for outcome in outcomes})
    groups = {kind: [outcome for outcome in outcomes if outcome.kind == kind] for kind in kinds}
    return {name: _counts(group, weights) for name, group in {**groups, "all": list(outcomes)}.items()}


def _counts(outcomes: Sequence[Outcome], weights: float | None) -> dict[str, Any]:
    seconds = [o.ended_after_s for o in outcomes if o.ended_after_s is not None and not o.is_control]
    return {
        "runs": len(outcomes),
        "hangs": sum(outcome.hung for outcome in outcomes),
        "orphans": sum(outcome.orphans for outcome in outcomes),
        "leaks": sum(len(outcome.leaks) for outcome in outcomes),
        "by_torch": sum(len(outcome.left_by_torch) for outcome in outcomes),
        "unnamed": sum(not (o.names_rank or o.is_control or o.reported) for o in outcomes),
        "wrong": sum(not outcome.is_right(weights) for outcome in outcomes),
        "median_s": round(median(seconds), 2) if seconds else None,
        "maximum_s": round(max(seconds), 2) if seconds else None,
    }


def lines(counts: dict[str, dict[str, Any]]) -> list[str]:
    """As a table."""
    columns = list(counts["all"])
    table = [f"{'fault':14}" + "".join(f"{column:>11}" for column in columns)]
    for kind, values in counts.items():
        cells = ("-" if values[column] is None else str(values[column]) for column in columns)
        table.append(f"{kind:14}" + "".join(f"{cell:>11}" for cell in cells))
    return table
