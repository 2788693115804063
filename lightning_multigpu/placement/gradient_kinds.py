"""Kinds of gradients."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from lightning_multigpu.placement.table import split_of

ABSENT, SPARSE, DENSE = 0, 1, 2
"""Kinds; that of a sum is the largest, since a sum is dense as soon as one of the gradients is."""


def kind_of(gradient: Tensor | None) -> int:
    return ABSENT if gradient is None else SPARSE if gradient.is_sparse else DENSE


def as_dense(gradient: Tensor, optimizer: Optimizer) -> Tensor:
    """A gradient in the dense form in which owners update.

    Raises:
        ValueError: it is sparse, and the optimizer may update only the rows that a sparse gradient has.
    """
    if gradient.is_sparse and split_of(optimizer) != "elements":
        raise ValueError(
            f"{type(optimizer).__name__} has sparse gradients, which owners update as dense ones, in all rows: use "
            "SGD or Adagrad, sparse=False with Adam, or strategy='ring_ddp'"
        )
    return gradient.to_dense()
