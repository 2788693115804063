"""Gradient clipping, skipped steps and gradient hooks that are the same on all stages of a pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import Precision
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from lightning_multigpu._lightning_internals import HOOKS_BEFORE_STEP
from lightning_multigpu.engine.pipeline.stages.gradients import RemoteGradients, StageSums
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from lightning_multigpu.engine.tensor_split.whole_reads import WholeReads
from lightning_multigpu.strategies.pipeline.split_model import SplitModel
from lightning_multigpu.strategies.steps.common_overflow import CommonOverflow
from lightning_multigpu.strategies.steps.hook_detection import has_hook


class StageAgreement:
    """Clips by the norm of all stages' gradients, and skips a step with inf or nan on all stages or on none.

    It replaces methods of the precision plugin and of its gradient scaler until :meth:`end`. Until then it also
    silences Lightning's advice to log with ``sync_dist=True``: the stages of a pipeline log the same values anyway.

    Args:
        plugin: the Trainer's precision plugin.
        model: the split model.
        tensor: the ranks that split the layers of this stage; None without a tensor split.
    """

    def __init__(self, plugin: Precision, model: SplitModel, tensor: TensorGroup | None = None) -> None:
        self._plugin = plugin
        self._module = model.module
        self._ownership = model.ownership
        self._tensor = tensor
        self._sums = StageSums(model.group, tensor)
        self._gradients = RemoteGradients(model.ownership, self._sums)
        self._run_hooks = getattr(plugin, HOOKS_BEFORE_STEP)
        vars(plugin)[HOOKS_BEFORE_STEP] = self._run_hooks_with_gradients
        vars(plugin)["clip_grad_by_norm"] = self._clip
        warnings.filterwarnings("ignore", "It is recommended to use `self.log")
        self._filter: Any = warnings.filters[0]
        self._overflow = CommonOverflow(plugin, self._sums.any)

    def end(self) -> None:
        """Gives the plugin and its scaler their own methods back."""
        for replaced in (HOOKS_BEFORE_STEP, "clip_grad_by_norm"):
            vars(self._plugin).pop(replaced, None)
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
        self._overflow.end()

    @contextmanager
    def gradients_for(self, *hooks: str) -> Iterator[None]:
        """Within the block the gradients are those of one device, if the user's code has one of the hooks.

        Parameters of other stages have gradients too, and split ones are whole: see :class:`.RemoteGradient` and
        :class:`.WholeReads`.
        """
        if not any(has_hook(hook, self._module) for hook in hooks):
            yield
            return
        with self._gradients.shown(), nullcontext() if self._tensor is None else WholeReads(self._tensor):
            yield

    def _run_hooks_with_gradients(self, model: pl.LightningModule, optimizer: Any) -> None:
        with self.gradients_for("on_before_optimizer_step", "configure_gradient_clipping"):
            self._run_hooks(model, optimizer)

    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        with torch._C.DisableTorchFunction():  # it looks at parts
            self._clip_parts(optimizer, clip_val)

    def _clip_parts(self, optimizer: Optimizer, clip_val: float) -> None:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        norm = self._sums.norm([p for p in self._ownership.counted() if id(p) in own])
        held = [p for p in self._ownership.held() if id(p) in own and p.grad is not None]
        dtype = held[0].grad.dtype if held and held[0].grad is not None else norm.dtype
        clip_grads_with_norm_(held, clip_val, norm.to(dtype))
