"""Statistics of the figures of one rank, and their aggregation over the ranks of a run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Aggregation = Literal["sum", "max", "mean"]
Statistics = dict[str, float]
"""``{"median", "p95", "mean", "last"}`` of one figure."""

STATISTICS = ("median", "p95", "mean", "last")


class Series:
    """The values of one figure, in order, in bounded memory.

    Mean and last value are of all values; median and 95th percentile are of the newest ``capacity`` values.

    Args:
        warm_up: how many of the first values are left out, as long as others follow: the first optimizer step of a run
            allocates memory, builds buckets and tunes kernels.
        capacity: how many values are kept.
    """

    def __init__(self, *, warm_up: int = 0, capacity: int = 1 << 16) -> None:
        self.values: deque[float] = deque(maxlen=capacity)
        """The newest values, those of the warm-up included while there is no other."""
        self._warm_up = warm_up
        self._count = 0
        self._weighted_sum = 0.0
        self._weight = 0.0

    def __len__(self) -> int:
        """How many values were appended, warm-up included."""
        return self._count

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
        if self._count == self._warm_up:
            self.values.clear()
            self._weighted_sum, self._weight = 0.0, 0.0
        self._count += 1
        self.values.append(value)
        self._weighted_sum += value * weight
        self._weight += weight

    def statistics(self) -> Statistics | None:
        """Median, 95th percentile, mean and last value; None where nothing was recorded."""
        if not self.values:
            return None
        ordered = sorted(self.values)
        return {
            "median": quantile(ordered, 0.5),
            "p95": quantile(ordered, 0.95),
            "mean": self._weighted_sum / self._weight,
            "last": self.values[-1],
        }


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and extremes of ``count`` values."""

    median: float
    p25: float
    p75: float
    min: float
    max: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ``ValueError`` where there is no value."""
        ordered = sorted(values)
        median, p25, p75 = (quantile(ordered, share) for share in (0.5, 0.25, 0.75))
        return cls(median, p25, p75, ordered[0], ordered[-1], len(ordered))

    def scaled(self, factor: float) -> Spread:
        """In another unit."""
        median, p25, p75, low, high = (factor * v for v in (self.median, self.p25, self.p75, self.min, self.max))
        return Spread(median, p25, p75, low, high, self.count)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the ascending values, at least one, lie, interpolated between neighbours."""
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
