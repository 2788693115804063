"""What a compression saved, and what it lost."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class CompressionStatistics:
    """Sums over everything that this rank has sent."""

    uncompressed_bytes: int = 0
    """What a ring would have sent of the tensors as they were."""
    sent_bytes: int = 0
    """Payload that was sent instead."""
    had_square: float = 0.0
    lost_square: float = 0.0

    @property
    def ratio(self) -> float:
        """Bytes without compression over bytes with it; NaN before anything was sent."""
        return self.uncompressed_bytes / self.sent_bytes if self.sent_bytes else math.nan

    @property
    def relative_error(self) -> float:
        """The L2 norm of what was lost, over that of what there was to send; NaN before anything was sent.

        What there was to send is gradients with the errors that were fed back. Steps that were not finite do not count.
        """
        return math.sqrt(self.lost_square / self.had_square) if self.had_square else math.nan

    def add_loss(self, had_square: float, lost: Tensor) -> None:
        """Counts one encoded run of elements.

        Args:
            had_square: the sum of squares of what there was to send.
            lost: that minus what was sent.
        """
        lost_square = square(lost)
        if math.isfinite(had_square) and math.isfinite(lost_square):
            self.had_square += had_square
            self.lost_square += lost_square


def square(tensor: Tensor) -> float:
    """The sum of the squares of a flat tensor."""
    return float(torch.dot(tensor, tensor))
