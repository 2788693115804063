"""The spread of repeated measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lightning_multigpu.report.statistics import quantile


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

    def as_json(self) -> dict[str, float]:
        """The fields by their names."""
        return asdict(self)
