"""Metrics after a failure of the job.

Callbacks that save at an exception read the monitored metric, which would wait for ranks that have ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
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
                part.distributed_available_fn = partial(_is_available, part.distributed_available_fn)


def _is_available(before: Callable[[], bool]) -> bool:
    return dist.is_initialized() and dist.group.WORLD not in _failed_worlds and before()
