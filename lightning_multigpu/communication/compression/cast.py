"""Half-precision gradients on the wire: two bytes an element instead of four, without state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_multigpu.communication.compression.compressor import ElementwiseCompressor


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
        values.add_(wire.view(self.dtype).float())  # an addition of mixed types is fifty times as slow

    def is_finite(self, wire: Tensor, numel: int) -> bool:
        return bool(wire.view(self.dtype).isfinite().all())


@dataclass(frozen=True)
class Fp16(_Cast):
    """IEEE half precision: 11 significant bits; what is beyond 65504 becomes infinite, below 6e-8 zero."""

    name = "fp16"
    dtype = torch.float16


@dataclass(frozen=True)
class Bf16(_Cast):
    """The upper half of a float32: its range, with 8 significant bits."""

    name = "bf16"
    dtype = torch.bfloat16
