"""Compressors that write gradients in fewer bytes, bfloat16 or 8-bit integers, from a user's setting."""

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


class Compressor(ABC):
    """Encodes each run of elements of a gradient by itself; the size depends on the number of elements only.

    Objects have no state and may be shared. In the methods, ``values`` is flat and float32. ``wire`` is flat ``uint8``
    with :meth:`encoded_bytes` elements, at an address that is a multiple of 8.
    """

    name: ClassVar[str]
    """The name in a user's setting."""
    has_error_feedback: ClassVar[bool]
    """Whether a step's error is added to the gradients of the next step."""

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


@dataclass(frozen=True)
class Bf16(Compressor):
    """The upper half of a float32: its range, with 8 significant bits."""

    name = "bf16"
    has_error_feedback = False

    def encoded_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor, wire: Tensor) -> None:
        halves = wire.view(torch.bfloat16)
        halves.copy_(values)
        values.sub_(halves.float())

    def decode(self, wire: Tensor, values: Tensor) -> None:
        values.copy_(wire.view(torch.bfloat16))

    def add_decoded(self, wire: Tensor, values: Tensor) -> None:
        values.add_(wire.view(torch.bfloat16).float())  # adding mixed types takes fifty times as long

    def is_finite(self, wire: Tensor, numel: int) -> bool:
        return bool(wire.view(torch.bfloat16).isfinite().all())


@dataclass(frozen=True)
class Int8(Compressor):
    """Multiples of 1/127 of a chunk's largest magnitude, rounded to the nearest.

    On the wire::

        | scale of chunk 0 | scale of chunk 1 | ... (float32) | element 0 | element 1 | ... (int8) |

    With NaN or infinity in a chunk, its scale and so all of its elements are not finite.

    Attributes:
        chunk_size: elements that share a scale.
    """

    chunk_size: int = 1024

    name = "int8"
    has_error_feedback = True

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


COMPRESSORS: dict[str, type[Compressor]] = {kind.name: kind for kind in (Bf16, Int8)}
"""Name -> compressor."""


def make_compressor(name: str) -> Compressor:
    """The compressor of a name.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in COMPRESSORS:
        raise ValueError(f"compression={name!r} is unknown; use {', '.join(map(repr, COMPRESSORS))}")
    return COMPRESSORS[name]()
