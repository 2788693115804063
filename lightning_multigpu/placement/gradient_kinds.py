"""Kinds of gradients, and the rows of sparse ones."""

from __future__ import annotations

import torch
from torch import Tensor

ABSENT, SPARSE, DENSE = 0, 1, 2
"""Kinds; that of a sum is the largest, since a sum is dense as soon as one of the gradients is."""


def kind_of(gradient: Tensor | None) -> int:
    return ABSENT if gradient is None else SPARSE if gradient.is_sparse else DENSE


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
