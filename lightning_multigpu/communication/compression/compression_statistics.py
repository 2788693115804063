"""Statistics of a compression: bytes saved and error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_LOSSES_COUNTED_EVERY = 16
"""Steps; squaring all values in every step would take a tenth of the time of compressing them."""


@dataclass
class CompressionStatistics:
    """Sums over all tensors that this rank has sent; the error is summed in every 16th step, from the first on."""

    uncompressed_bytes: int = 0
    """Bytes that a ring would have sent of the uncompressed tensors."""
    sent_bytes: int = 0
    """Bytes that were sent instead."""
    had_square: float = 0.0
    lost_square: float = 0.0
    steps: int = 0

    @property
    def ratio(self) -> float:
        """Bytes without compression over bytes with it; NaN before anything was sent."""
        return self.uncompressed_bytes / self.sent_bytes if self.sent_bytes else math.nan

    @property
    def relative_error(self) -> float:
        """The L2 norm of the error over the norm of the given values; NaN before the first compressed step.

        The given values are gradients plus the errors of the step before. Steps that were not finite do not count.
        """
        return math.sqrt(self.lost_square / self.had_square) if self.had_square else math.nan

    def square(self, values: Tensor) -> float | None:
        """The sum of squares of the given values (flat); None in steps whose error is not counted."""
        return _square(values) if self.steps % _LOSSES_COUNTED_EVERY == 0 else None

    def add_loss(self, had_square: float | None, lost: Tensor) -> None:
        """Adds the error of one encoded run of elements.

        Args:
            had_square: the result of :meth:`square` for the given values.
            lost: the given values minus the sent ones, flat.
        """
        if had_square is None:
            return
        lost_square = _square(lost)
        if math.isfinite(had_square) and math.isfinite(lost_square):
            self.had_square += had_square
            self.lost_square += lost_square

    def end_step(self) -> None:
        """Ends a step in which something was compressed."""
        self.steps += 1


def _square(tensor: Tensor) -> float:
    return float(torch.dot(tensor, tensor))
