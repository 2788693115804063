"""Metrics after a failure of the job: callbacks that save at an exception read them, and the other ranks are gone."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch import nn

_failed_worlds: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def compute_alone(module: nn.Module) -> None:
    """Has the metrics of a module compute from this rank's states, until this process has another default group."""
    if dist.is_initialized():
        assert dist.group.WORLD is not None
        _failed_worlds.add(dist.group.WORLD)
        parts: Iterable[Any] = module.modules()
        for part in parts:
            if hasattr(part, "distributed_available_fn"):  # a torchmetrics.Metric
                part.distributed_available_fn = _is_there


def _is_there() -> bool:
    return dist.is_initialized() and dist.group.WORLD not in _failed_worlds
