"""Statistics of the figures of one rank, and their aggregation over the ranks of a run."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

Aggregation = Literal["sum", "max", "mean"]
Statistics = dict[str, float]
"""``{"median", "p95", "mean", "last"}`` of one figure."""

STATISTICS = ("median", "p95", "mean", "last")


class Series:
    """The values of one figure, in order, in bounded memory.

    Mean and last value are exact however long the series grows. Median and 95th percentile are exact up to
    ``capacity`` values; beyond it every second value kept is dropped and from then on only every second, fourth, ...
    new one is kept, so that they rest on between half of ``capacity`` and all of it, evenly spread over the run.

    Args:
        warm_up: how many of the first values are left out, as long as others follow: the first optimizer step of a run
            allocates memory, builds buckets and tunes kernels.
        capacity: how many values are kept, 2 or more.
    """

    def __init__(self, *, warm_up: int = 0, capacity: int = 1 << 16) -> None:
        self._warm_up = warm_up
        self._capacity = capacity
        self._warm_up_values: list[tuple[float, float]] = []
        self._kept = array("d")
        self._stride = 1
        self._count = 0
        self._weighted_sum = 0.0
        self._weight = 0.0
        self._last = math.nan
        self.largest = -math.inf
        """The largest value, the first ones included while there is no other."""

    def __len__(self) -> int:
        """How many values were appended, warm-up included."""
        return self._count + len(self._warm_up_values)

    def append(self, value: float, weight: float = 1.0) -> None:
        """Adds a value; ``weight`` counts in the mean only.

        A rate gets the time over which it was measured as its weight, so that the mean is total over total.

        Raises:
            ValueError: the value is not finite, or the weight is not above 0.
        """
        if not math.isfinite(value):
            raise ValueError(f"value={value}: a figure without a meaning is left out, not recorded")
        if not weight > 0:
            raise ValueError(f"weight={weight}: a weight is above 0")
        if len(self._warm_up_values) < self._warm_up:
            self._warm_up_values.append((value, weight))
            self.largest = max(self.largest, value)
            return
        if self._count % self._stride == 0:
            if len(self._kept) == self._capacity:
                self._kept = self._kept[::2]
                self._stride *= 2
            if self._count % self._stride == 0:
                self._kept.append(value)
        self.largest = max(self.largest, value) if self._count else value
        self._count += 1
        self._weighted_sum += value * weight
        self._weight += weight
        self._last = value

    def statistics(self) -> Statistics | None:
        """Median, 95th percentile, mean and last value; None where nothing was recorded."""
        if self._count:
            values, mean, last = sorted(self._kept), self._weighted_sum / self._weight, self._last
        elif self._warm_up_values:
            first, weights = zip(*self._warm_up_values, strict=True)
            values, mean, last = sorted(first), fmean(first, weights), first[-1]
        else:
            return None
        return {"median": quantile(values, 0.5), "p95": quantile(values, 0.95), "mean": mean, "last": last}


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the values lie, interpolated linearly between neighbours.

    Args:
        ordered: the values in ascending order, at least one.
        share: between 0 and 1.
    """
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def aggregate(values: Sequence[float], how: Aggregation) -> float:
    """One figure of the run out of the figures of the ranks, at least one."""
    return max(values) if how == "max" else sum(values) / (len(values) if how == "mean" else 1)


def aggregate_ranks(
    ranks: Sequence[Mapping[str, Statistics]], aggregations: Mapping[str, Aggregation]
) -> dict[str, Statistics]:
    """Each statistic of each key over the ranks that have it, for the keys in ``aggregations``, in their order.

    Each statistic is aggregated by itself: the median of a sum is the sum of the ranks' medians.
    """
    run: dict[str, Statistics] = {}
    for key, how in aggregations.items():
        having = [metrics[key] for metrics in ranks if key in metrics]
        if having:
            run[key] = {name: aggregate([statistics[name] for statistics in having], how) for name in STATISTICS}
    return run
