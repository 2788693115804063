"""Clipping by the norm of whole gradients, and skipped steps, where ranks hold parts of parameters."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup


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
        self._scaler: Any = getattr(plugin, "scaler", None)
        vars(plugin)["clip_grad_by_norm"] = self._clip
        if self._scaler is not None:
            self._unscale = self._scaler.unscale_
            vars(self._scaler)["unscale_"] = self._unscale_together

    def end(self) -> None:
        """Gives the plugin and its scaler their own methods back."""
        vars(self._plugin).pop("clip_grad_by_norm", None)
        if self._scaler is not None:
            vars(self._scaler).pop("unscale_", None)

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

    def _unscale_together(self, optimizer: Optimizer) -> None:
        self._unscale(optimizer)
        found = self._scaler._found_inf_per_device(optimizer)
        for flag in found.values():
            self._group.all_reduce(flag, "overflow")
