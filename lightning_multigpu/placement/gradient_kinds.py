"""Kinds of gradients, and the rows of sparse ones."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_multigpu.placement.table import Piece, fill

ABSENT, DENSE, SPARSE = 0, 1, 2


def kind_of(gradient: Tensor | None) -> int:
    return ABSENT if gradient is None else SPARSE if gradient.is_sparse else DENSE


def common_kind(kinds: Iterable[int]) -> int:
    """The kind of a sum: dense as soon as one of the gradients is."""
    return min((kind for kind in kinds if kind != ABSENT), default=ABSENT)


def rows_of(gradient: Tensor) -> Tensor:
    """Which rows a sparse gradient has, those of zeros too: bool, shape (rows of the parameter,)."""
    rows = torch.zeros(gradient.shape[0], dtype=torch.bool)
    rows[gradient.detach().coalesce().indices()[0].cpu()] = True
    return rows


def sparse(dense: Tensor, rows: Tensor | None) -> Tensor:
    """The sparse gradient that has these rows of a dense one, and all others that are not zero.

    An optimizer updates the moments of the rows that a gradient has, also where their values are zero.
    """
    present = (dense != 0).flatten(1).any(1) if dense.dim() > 1 else dense != 0
    if rows is not None:
        present |= rows.to(present.device)
    return torch.sparse_coo_tensor(
        present.nonzero().T, dense[present], dense.shape, is_coalesced=True, check_invariants=False
    )


def take_average(parameter: Tensor, piece: Piece, average: Tensor, kind: int, rows: Tensor | None) -> None:
    """Changes the elements of a piece of ``parameter.grad`` to an average over the ranks.

    The parameter has a gradient after that unless ``kind``, of the average, is ABSENT. ``average`` is flat, in any
    memory; ``rows`` are those of a sparse one, which is in one piece.
    """
    if kind == ABSENT:
        return
    if parameter.grad is None or parameter.grad.is_sparse:
        parameter.grad = torch.empty_like(parameter)
    fill(parameter.grad, piece, average)
    if kind == SPARSE and piece.numel == parameter.numel():
        parameter.grad = sparse(parameter.grad, rows)
