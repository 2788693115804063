"""Batch size: the tensors of a batch, and the number of its samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """The tensors of nested mappings, sequences and dataclasses, in order."""
    if isinstance(batch, Tensor):
        yield batch
        return
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    elif is_dataclass(batch):
        parts = (getattr(batch, field.name) for field in fields(batch))
    for part in parts:
        yield from tensors_in(part)


def leading_size(batch: Any) -> int | None:
    """The first dimension of the first tensor in a batch, 1 if it has no dimension; None if there is no tensor."""
    first = next(tensors_in(batch), None)
    if first is None:
        return None
    return first.shape[0] if first.ndim else 1
