"""Gradients where ranks hold parts of parameters: clipping, and skipped steps."""

from __future__ import annotations

import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor

from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from lightning_multigpu.strategies.steps.plugin_methods import PluginMethods


def split_gradients(plugin: Precision, group: TensorGroup, device: torch.device) -> PluginMethods:
    """Clips by the norm of all ranks' gradients, and skips a step with inf or nan on all ranks or on none.

    Args:
        plugin: the Trainer's precision plugin, whose methods are replaced until ``end()`` of what is returned.
        group: the ranks that hold parts.
        device: of this rank.
    """

    def reduce_sum(number: Tensor) -> Tensor:
        return group.all_reduce(number.to(device), "norm or overflow")

    return PluginMethods(
        plugin,
        owned=lambda held: [p for p in held if group.rank == 0 or split_of(p) is not None],
        reduce_sum=reduce_sum,
    )
