"""Kinds of gradients, and clipping by a norm whose parts are in several processes, as torch.nn.utils does."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

ABSENT, DENSE, SPARSE = 0, 1, 2


def kind_of(gradient: Tensor | None) -> int:
    return ABSENT if gradient is None else SPARSE if gradient.is_sparse else DENSE


def sum_of_squares(gradients: Iterable[Tensor]) -> float:
    """The sum of the squares of all elements; norms of 16-bit gradients are computed in float32."""
    squares = 0.0
    for gradient in gradients:
        dtype = torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else None
        squares += torch.linalg.vector_norm(gradient, dtype=dtype).double().item() ** 2
    return squares


def clip_norm(gradients: Iterable[Tensor], squares: float, max_norm: float) -> None:
    """Clips gradients to the norm ``max_norm``, where ``squares`` is the sum of squares of all shards."""
    factor = max_norm / (math.sqrt(squares) + 1e-6)
    if not factor >= 1.0:  # nan too
        for gradient in gradients:
            gradient.mul_(factor)
