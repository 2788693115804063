"""Gradients as 8-bit integers: a fourth of the bytes, and one scale a chunk."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_multigpu.communication.compression.compressor import ElementwiseCompressor
from lightning_multigpu.communication.compression.option_errors import require_int

_LARGEST = 127
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # so that its reciprocal is finite


@dataclass(frozen=True)
class Int8(ElementwiseCompressor):
    """Multiples of 1/127 of a chunk's largest magnitude, rounded to the nearest.

    On the wire::

        | scale of chunk 0 | scale of chunk 1 | ... (float32) | element 0 | element 1 | ... (int8) |

    NaN and infinity make the scale of their chunk so: the whole chunk then arrives as not finite.

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
            scales.div_(_LARGEST).clamp_(min=_SMALLEST_SCALE)
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
        """Values, scales and integers with a row a chunk: first the full chunks, then a shorter last one."""
        numel = values.numel()
        full = numel - numel % self.chunk_size
        scales = wire[: self._scales_bytes(numel)].view(torch.float32).unsqueeze(1)
        integers = wire[self._scales_bytes(numel) :].view(torch.int8)
        if full:
            rows = full // self.chunk_size
            yield values[:full].view(rows, -1), scales[:rows], integers[:full].view(rows, -1)
        if full < numel:
            yield values[full:].view(1, -1), scales[-1:], integers[full:].view(1, -1)
