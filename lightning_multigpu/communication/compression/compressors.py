"""Compressors that write gradients in fewer bytes: half precision, 8-bit integers, or the largest entries only."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

_LARGEST_INT8 = 127
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # so that its reciprocal is finite
_TOPK_SAMPLES = 4096


class Compressor(ABC):
    """How gradients are encoded. Objects have no state and may be shared."""

    name: ClassVar[str]
    """The name in a user's setting."""
    has_error_feedback: ClassVar[bool]
    """Whether a step's error is added to the gradients of the next step."""


class ElementwiseCompressor(Compressor):
    """A compressor that encodes each run of elements by itself; its size depends on the number of elements only.

    In the methods, ``values`` is flat and float32. ``wire`` is flat ``uint8`` with :meth:`encoded_bytes` elements, at
    an address that is a multiple of 8.
    """

    @abstractmethod
    def encoded_bytes(self, numel: int) -> int:
        """Bytes of ``numel`` encoded elements."""

    @abstractmethod
    def encode(self, values: Tensor, wire: Tensor) -> None:
        """Writes ``values`` to ``wire``, and then the error (given minus decoded values) to ``values``.

        NaN and infinity must not become finite values in :meth:`decode`.
        """

    @abstractmethod
    def decode(self, wire: Tensor, values: Tensor) -> None:
        """Overwrites ``values`` with the decoded ``wire``."""

    @abstractmethod
    def add_decoded(self, wire: Tensor, values: Tensor) -> None:
        """Adds the decoded ``wire`` to ``values``."""

    @abstractmethod
    def is_finite(self, wire: Tensor, numel: int) -> bool:
        """Whether all of the ``numel`` elements in ``wire`` are finite."""


class _Cast(ElementwiseCompressor):
    dtype: ClassVar[torch.dtype]
    has_error_feedback = False

    def encoded_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor, wire: Tensor) -> None:
        halves = wire.view(self.dtype)
        halves.copy_(values)
        values.sub_(halves.float())

    def decode(self, wire: Tensor, values: Tensor) -> None:
        values.copy_(wire.view(self.dtype))

    def add_decoded(self, wire: Tensor, values: Tensor) -> None:
        values.add_(wire.view(self.dtype).float())  # adding mixed types takes fifty times as long

    def is_finite(self, wire: Tensor, numel: int) -> bool:
        return bool(wire.view(self.dtype).isfinite().all())


@dataclass(frozen=True)
class Fp16(_Cast):
    """IEEE half precision: 11 significant bits; values beyond 65504 become infinite, below 6e-8 zero."""

    name = "fp16"
    dtype = torch.float16


@dataclass(frozen=True)
class Bf16(_Cast):
    """The upper half of a float32: its range, with 8 significant bits."""

    name = "bf16"
    dtype = torch.bfloat16


@dataclass(frozen=True)
class Int8(ElementwiseCompressor):
    """Multiples of 1/127 of a chunk's largest magnitude, rounded to the nearest.

    On the wire::

        | scale of chunk 0 | scale of chunk 1 | ... (float32) | element 0 | element 1 | ... (int8) |

    With NaN or infinity in a chunk, its scale and so all of its elements are not finite.

    Args:
        chunk_size: elements that share a scale.

    Raises:
        ValueError: ``chunk_size`` is no integer of 1 or more.
    """

    chunk_size: int = 1024

    name = "int8"
    has_error_feedback = True

    def __post_init__(self) -> None:
        require_int("chunk_size", self.chunk_size, at_least=1, why="a scale is shared by at least 1 element")

    def encoded_bytes(self, numel: int) -> int:
        return self._scales_bytes(numel) + numel

    def encode(self, values: Tensor, wire: Tensor) -> None:
        for chunks, scales, integers in self._rows(values, wire):
            torch.amax(chunks, 1, keepdim=True, out=scales)
            torch.maximum(scales, chunks.amin(1, keepdim=True).neg_(), out=scales)
            scales.div_(_LARGEST_INT8).clamp_(min=_SMALLEST_SCALE)
            rounded = torch.mul(chunks, scales.reciprocal()).round_()
            integers.copy_(rounded)
            chunks.addcmul_(rounded, scales, value=-1)

    def decode(self, wire: Tensor, values: Tensor) -> None:
        for chunks, scales, integers in self._rows(values, wire):
            chunks.copy_(integers)
            chunks.mul_(scales)

    def add_decoded(self, wire: Tensor, values: Tensor) -> None:
        for chunks, scales, integers in self._rows(values, wire):
            chunks.addcmul_(integers.float(), scales)

    def is_finite(self, wire: Tensor, numel: int) -> bool:
        scales = wire[: self._scales_bytes(numel)].view(torch.float32)
        return not numel or math.isfinite(float(scales.amax()))

    def _scales_bytes(self, numel: int) -> int:
        return 4 * -(-numel // self.chunk_size)

    def _rows(self, values: Tensor, wire: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Values, scales and integers, one row for each chunk: first the full chunks, then a shorter last one."""
        numel = values.numel()
        full = numel - numel % self.chunk_size
        scales = wire[: self._scales_bytes(numel)].view(torch.float32).unsqueeze(1)
        integers = wire[self._scales_bytes(numel) :].view(torch.int8)
        if full:
            rows = full // self.chunk_size
            yield values[:full].view(rows, -1), scales[:rows], integers[:full].view(rows, -1)
        if full < numel:
            yield values[full:].view(1, -1), scales[-1:], integers[full:].view(1, -1)


@dataclass(frozen=True)
class TopK(ElementwiseCompressor):
    """The entries of largest magnitude of each segment; the other entries become the error.

    On the wire::

        | index 0 | index 1 | ... (int32, within the segment) | value 0 | value 1 | ... (float32) |

    NaN and infinity count as the largest. The owner of a segment sends as many entries of the sum as each rank has sent
    to it, again the largest.

    Args:
        ratio: the share of entries that are sent, at least one of each segment.

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

    A threshold guessed from a sample of the elements leaves few candidates to sort. If it leaves too few, all elements
    are sorted.
    """
    stride = magnitudes.numel() // _TOPK_SAMPLES
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


def require_int(name: str, value: object, *, at_least: int, why: str) -> None:
    """Raises ValueError if ``value`` is no integer, or below the limit."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name}={value!r}: {why}; use an integer of {at_least} or more")
