"""PowerSGD: a matrix of gradients as the product of two thin ones, one step of a power iteration a training step.

Source: T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: practical low-rank gradient compression for distributed
optimization", NeurIPS 2019, algorithm 1. With M the gradients of a rank and Q what the last step ended with::

    P = M Q              summed over the ranks, then orthonormalised
    Q = transpose(M) P   averaged over the ranks
    the average of M is taken to be P transpose(Q); a rank keeps the error M - P transpose(its own Q)
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_multigpu.communication.compression.compressor import Compressor
from lightning_multigpu.communication.compression.option_errors import require_int
from lightning_multigpu.communication.compression.pieces import Piece

_RANKS_BY_OUTER_PRODUCTS = 4  # up to here a sum of outer products is faster than a product of matrices


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Matrices travel as two factors of a low rank; biases and small matrices travel as they are.

    Tensors of more than two dimensions are matrices of their first dimension by the others.

    Args:
        rank: of the factors: an (m, n) matrix becomes ``rank * (m + n)`` numbers.
        start_step: so many steps are not compressed: early gradients change fast.

    Raises:
        ValueError: ``rank`` is no integer of 1 or more, or ``start_step`` none of 0 or more.
    """

    rank: int = 4
    start_step: int = 10

    name = "powersgd"
    has_error_feedback = True

    def __post_init__(self) -> None:
        require_int("rank", self.rank, at_least=1, why="a product of factors has at least rank 1")
        require_int("start_step", self.start_step, at_least=0, why="it is the first step that is compressed")

    def factors(self, piece: Piece) -> tuple[int, int] | None:
        """Rows and columns of the piece as a matrix, or None where factors would not be smaller, or it is a part."""
        if len(piece.shape) < 2 or not piece.is_whole or not piece.numel:
            return None
        rows, columns = piece.shape[0], math.prod(piece.shape[1:])
        return (rows, columns) if self.rank * (rows + columns) < rows * columns else None


def first_factor(name: str, rank: int, columns: int) -> Tensor:
    """What the power iteration of a parameter starts with, (rank, columns): random numbers that depend on its name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
    return torch.randn(rank, columns, generator=torch.Generator().manual_seed(seed))


def orthonormalise(factor: Tensor) -> None:
    """Makes the columns of ``factor`` (rows, rank) orthonormal, in place; all NaN where it is not finite."""
    if factor.isfinite().all():
        factor.copy_(torch.linalg.qr(factor).Q)
    else:
        factor.fill_(math.nan)


def add_product(matrix: Tensor, left: Tensor, right: Tensor, *, factor: float = 1.0) -> None:
    """Adds ``factor * left @ right`` to ``matrix`` (rows, columns); ``left`` is (rows, rank)."""
    rank = right.shape[0]
    if rank > _RANKS_BY_OUTER_PRODUCTS:
        matrix.addmm_(left, right, alpha=factor)
        return
    for column, row in zip(left.unbind(1), right.unbind(0), strict=True):
        matrix.addr_(column, row, alpha=factor)
