"""The number of samples in a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def leading_size(batch: Any) -> int | None:
    """The first dimension of the first tensor in a batch, 1 if it has none; None where there is no tensor."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    elif is_dataclass(batch):
        parts = (getattr(batch, field.name) for field in fields(batch))
    return next((size for size in map(leading_size, parts) if size is not None), None)
