"""The largest gradients only, as index and value."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_multigpu.communication.compression.compressor import ElementwiseCompressor

_SAMPLES = 4096


@dataclass(frozen=True)
class TopK(ElementwiseCompressor):
    """The entries of largest magnitude of each segment that is exchanged; the others wait in the error feedback.

    On the wire::

        | index 0 | index 1 | ... (int32, within the segment) | value 0 | value 1 | ... (float32) |

    NaN and infinity count as the largest of all. The owner of a segment sends the largest entries of the sum, as many
    as each rank has sent to it.

    Args:
        ratio: the share of entries that is sent, at least one of each segment.

    Raises:
        ValueError: ``ratio`` is no number in (0, 1].
    """

    ratio: float = 0.01

    name = "topk"
    has_error_feedback = True

    def __post_init__(self) -> None:
        is_number = isinstance(self.ratio, (int, float)) and not isinstance(self.ratio, bool)
        if not (is_number and 0 < self.ratio <= 1):
            raise ValueError(
                f"ratio={self.ratio!r}: it is the share of gradient entries to send, so use more than 0 and at most 1, "
                "0.01 for example"
            )

    def encoded_bytes(self, numel: int) -> int:
        return 8 * self._count(numel)

    def encode(self, values: Tensor, wire: Tensor) -> None:
        chosen = _largest(values.abs(), self._count(values.numel()))
        indices, sent = _fields(wire)
        indices.copy_(chosen)
        torch.index_select(values, 0, chosen, out=sent)
        values.index_fill_(0, chosen, 0.0)

    def decode(self, wire: Tensor, values: Tensor) -> None:
        indices, sent = _fields(wire)
        values.zero_().index_copy_(0, indices.long(), sent)

    def add_decoded(self, wire: Tensor, values: Tensor) -> None:
        indices, sent = _fields(wire)
        values.index_add_(0, indices, sent)

    def is_finite(self, wire: Tensor, numel: int) -> bool:
        return not numel or math.isfinite(float(_fields(wire)[1].abs().amax()))

    def _count(self, numel: int) -> int:
        return min(numel, max(1, math.ceil(self.ratio * numel)))


def _fields(wire: Tensor) -> tuple[Tensor, Tensor]:
    middle = wire.numel() // 2
    return wire[:middle].view(torch.int32), wire[middle:].view(torch.float32)


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest; NaN is larger than infinity.

    A threshold that is guessed from every few elements leaves few candidates to be sorted; where it leaves too few,
    all elements are.
    """
    stride = magnitudes.numel() // _SAMPLES
    if stride < 2:
        return magnitudes.topk(count, sorted=False).indices
    samples = magnitudes[::stride]
    guess = count * samples.numel() // magnitudes.numel()
    position = guess + 3 * math.isqrt(guess) + 2  # three standard deviations further down
    if position >= samples.numel():
        return magnitudes.topk(count, sorted=False).indices
    threshold = samples.topk(position, sorted=True).values[-1]
    candidates = magnitudes.le(threshold).logical_not_().nonzero().squeeze(1)  # NaN is not below the threshold either
    if candidates.numel() < count:
        return magnitudes.topk(count, sorted=False).indices
    return candidates[magnitudes[candidates].topk(count, sorted=False).indices]
