"""Gradients where ranks hold parts of parameters: clipping, skipped steps, and hooks that read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_multigpu._lightning_internals import HOOKS_BEFORE_STEP
from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from lightning_multigpu.engine.tensor_split.whole_reads import WholeReads
from lightning_multigpu.strategies.common_overflow import CommonOverflow

_WITH_HOOKS = ("post_backward", HOOKS_BEFORE_STEP)
"""Methods of a precision plugin that call the hooks of a module and of callbacks."""


class SplitGradients:
    """Clips by the norm of all ranks' gradients, and skips a step with inf or nan on all ranks or on none.

    ``on_after_backward`` and ``on_before_optimizer_step`` read whole gradients and parameters: see
    :class:`.WholeReads`.

    It replaces methods of the precision plugin and of its gradient scaler until :meth:`end`.

    Args:
        plugin: the Trainer's precision plugin.
        group: the ranks that hold parts.
    """

    def __init__(self, plugin: Precision, group: TensorGroup) -> None:
        self._plugin = plugin
        self._group = group
        vars(plugin)["clip_grad_by_norm"] = self._clip
        for name in _WITH_HOOKS:
            vars(plugin)[name] = self._reading(getattr(plugin, name))
        self._overflow = CommonOverflow(plugin, self._any_rank)

    def end(self) -> None:
        """Gives the plugin and its scaler their own methods back."""
        for name in ("clip_grad_by_norm", *_WITH_HOOKS):
            vars(self._plugin).pop(name, None)
        self._overflow.end()

    def _reading(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def reading(*args: Any) -> Any:
            with WholeReads(self._group):
                return method(*args)

        return reading

    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        with torch._C.DisableTorchFunction():  # it looks at parts
            self._clip_parts(optimizer, clip_val)

    def _clip_parts(self, optimizer: Optimizer, clip_val: float) -> None:
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
