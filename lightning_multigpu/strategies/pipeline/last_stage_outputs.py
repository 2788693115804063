"""What the stages of a pipeline decide together although Lightning asks each of them alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import Precision
from torch.nn import Module
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_multigpu._lightning_internals import HOOKS_BEFORE_STEP
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.pipeline.stages.gradients import RemoteGradients, StageSums
from lightning_multigpu.strategies.hook_detection import has_hook


class StageAgreement:
    """Clips by the norm of all stages' gradients, and skips a step with inf or nan on all stages or on none.

    The precision plugin's and its gradient scaler's own methods are covered for the time of the run. So is Lightning's
    advice to log with ``sync_dist=True``: the stages of a pipeline have the same values anyway.

    Args:
        plugin: the Trainer's precision plugin.
        ownership: which stage counts for which parameter.
        sums: over the stages.
        gradients: of other stages, which hooks before the optimizer's step see.
    """

    def __init__(self, plugin: Precision, ownership: Ownership, sums: StageSums, gradients: RemoteGradients) -> None:
        self._plugin = plugin
        self._scaler: Any = getattr(plugin, "scaler", None)
        self._ownership = ownership
        self._sums = sums
        self._gradients = gradients
        self._run_hooks = getattr(plugin, HOOKS_BEFORE_STEP)
        vars(plugin)[HOOKS_BEFORE_STEP] = self._run_hooks_with_gradients
        vars(plugin)["clip_grad_by_norm"] = self._clip
        warnings.filterwarnings("ignore", "It is recommended to use `self.log")
        self._filter: Any = warnings.filters[0]
        if self._scaler is not None:
            self._unscale = self._scaler.unscale_
            vars(self._scaler)["unscale_"] = self._unscale_together

    def end(self) -> None:
        """Gives the plugin its own methods back."""
        for covered in (HOOKS_BEFORE_STEP, "clip_grad_by_norm"):
            vars(self._plugin).pop(covered, None)
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
        if self._scaler is not None:
            vars(self._scaler).pop("unscale_", None)

    def _run_hooks_with_gradients(self, model: pl.LightningModule, optimizer: Any) -> None:
        looked_at = any(has_hook(hook, model) for hook in ("on_before_optimizer_step", "configure_gradient_clipping"))
        with self._gradients.shown() if looked_at else nullcontext():
            self._run_hooks(model, optimizer)

    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        norm = self._sums.norm([p for p in self._ownership.counted() if id(p) in own])
        held = [p for p in self._ownership.held() if id(p) in own and p.grad is not None]
        dtype = held[0].grad.dtype if held and held[0].grad is not None else norm.dtype
        clip_grads_with_norm_(held, clip_val, norm.to(dtype))

    def _unscale_together(self, optimizer: Optimizer) -> None:
        self._unscale(optimizer)
        found = self._scaler._found_inf_per_device(optimizer)
        if not found:  # this stage has no gradient, and the scaler insists on an answer
            found[torch.device("cpu")] = torch.zeros(1)
        for flag in found.values():
            self._sums.any(flag)


class LastStageOutputs(Callback):
    """Shows hooks on every stage what the last one has come to; it stands before all other callbacks.

    After a batch that is the loss, and whatever else the step returned, in the place of what Lightning was given: it
    wants the loss before a pipeline has computed it. At the end of an epoch it is what steps have kept in the module.

    Args:
        share_storage: gives all stages what steps have kept on the last one.
    """

    def __init__(self, share_storage: Callable[[], None]) -> None:
        self.outputs: dict[str, Any] = {}
        self._share_storage = share_storage

    def stand_first(self, trainer: pl.Trainer) -> None:
        """Puts it before the other callbacks; a Tuner has a list of its own for a while."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if self not in callbacks:
            callbacks.insert(0, self)

    def leave(self, trainer: pl.Trainer) -> None:
        """Takes it out of the Trainer's callbacks."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if self in callbacks:
            callbacks.remove(self)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(outputs, dict) and "loss" in outputs:
            outputs.update(self.outputs)
        self.outputs = {}

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._share_storage()

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._share_storage()

    @override
    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._share_storage()

    @override
    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._share_storage()


def gather_metrics_by(module: Module, gather: Any) -> list[Metric]:
    """Makes the module's metrics exchange their states by ``gather``; returns those that it was done for."""
    found = [part for part in module.modules() if isinstance(part, Metric) and part.dist_sync_fn is None]
    for metric in found:
        metric.dist_sync_fn = gather
    return found
