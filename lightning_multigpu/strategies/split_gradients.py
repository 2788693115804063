"""Clipping by the norm of whole gradients, and skipped steps, where ranks hold parts of parameters."""

from __future__ import annotations

import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from lightning_multigpu.strategies.common_overflow import CommonOverflow


class SplitGradients:
    """Clips by the norm of all ranks' gradients, and skips a step with inf or nan on all ranks or on none.

    It replaces methods of the precision plugin and of its gradient scaler until :meth:`end`.

    Args:
        plugin: the Trainer's precision plugin.
        group: the ranks that hold parts.
    """

    def __init__(self, plugin: Precision, group: TensorGroup) -> None:
        self._plugin = plugin
        self._group = group
        vars(plugin)["clip_grad_by_norm"] = self._clip
        self._overflow = CommonOverflow(plugin, self._any_rank)

    def end(self) -> None:
        """Gives the plugin and its scaler their own methods back."""
        vars(self._plugin).pop("clip_grad_by_norm", None)
        self._overflow.end()

    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        parts = [p.grad for p in parameters if split_of(p) is not None]
        whole = [p.grad for p in parameters if split_of(p) is None]
        squares = get_total_norm(parts).square() if parts else torch.zeros((), dtype=parameters[0].dtype)
        squares = self._group.all_reduce(squares.to(parameters[0].device).reshape(1), "gradient norm")[0]
        if whole:
            squares = squares + get_total_norm(whole).square().to(squares)
        clip_grads_with_norm_(parameters, clip_val, squares.sqrt())

    def _any_rank(self, flag: Tensor) -> None:
        self._group.all_reduce(flag, "overflow")
