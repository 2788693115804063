"""Checks that a pipeline can train a module with its callbacks, loggers and optimizers.

Every function returns nothing, and raises ``ValueError`` with the obstacle and the fix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import Callback, ModelPruning
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

from lightning_multigpu._lightning_internals import WEIGHT_AVERAGES, draws_graph
from lightning_multigpu.engine.parity import couples_parameters
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.strategies.steps.dry_run import check_takes_batch

if TYPE_CHECKING:
    import lightning.pytorch as pl


_BEFORE_ZERO_GRAD = (
    "on_before_zero_grad comes between the training step and its backward, and a pipeline runs both after it: changes "
    "by the hook would take effect one step too early; use on_train_batch_start or on_train_batch_end"
)


def check_module(module: pl.LightningModule) -> None:
    """The module leaves backward to Lightning, and its training step takes a batch."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ValueError(
            f"{name}.automatic_optimization=False: a pipeline runs backward within its schedule, so that manual "
            "optimization is not possible; use automatic optimization, or another strategy"
        )
    if is_overridden("backward", module):
        raise ValueError(f"{name} overrides backward, which a pipeline's schedule calls by itself; remove it")
    if is_overridden("on_before_zero_grad", module):
        raise ValueError(f"{name}.{_BEFORE_ZERO_GRAD}")
    check_takes_batch(module)


def check_callbacks(callbacks: Iterable[Callback]) -> None:
    """No callback copies the whole model, compares all weights, or comes between a step and its backward."""
    for callback in callbacks:
        if is_overridden("on_before_zero_grad", callback, Callback):
            raise ValueError(f"{type(callback).__name__}.{_BEFORE_ZERO_GRAD}")
        if isinstance(callback, WEIGHT_AVERAGES):
            need = "averages a copy of the whole model"
        elif isinstance(callback, ModelPruning):
            need = "chooses among all weights"
        else:
            continue
        raise ValueError(
            f"callbacks=[{type(callback).__name__}()] {need}, which no stage of a pipeline has; leave it out, or use "
            "ring_ddp"
        )


def check_loggers(loggers: Iterable[Logger], module: pl.LightningModule) -> None:
    """No logger runs the whole module by itself."""
    if module.example_input_array is not None and any(draws_graph(logger) for logger in loggers):
        raise ValueError(
            "log_graph=True of a logger runs the whole module, which no stage of a pipeline has; pass log_graph=False"
        )


def check_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Every optimizer works parameter by parameter, when the gradients of a batch are complete."""
    for optimizer in optimizers:
        name = type(optimizer).__name__
        try:
            couples = couples_parameters(optimizer)
        except Exception as error:  # any class may come from the optimizer
            rank_zero_warn(
                f"Whether {name} works parameter by parameter could not be checked ({type(error).__name__}: {error}). "
                "In a pipeline each stage has the gradients of its own layers: an optimizer that computes with all of "
                "them, such as their norm, would train wrongly"
            )
            couples = False
        if couples:
            raise ValueError(
                f"{name} works on all parameters at once, and a pipeline has them on different ranks; use an optimizer "
                "that works parameter by parameter, such as SGD or AdamW, and clip by "
                "Trainer(gradient_clip_val=...), which takes the norm over all stages"
            )
        check_accumulate_hooks(optimizer)


def check_accumulate_hooks(optimizer: Optimizer) -> None:
    """No parameter has a hook that runs when its gradient was added to."""
    if any(getattr(p, "_post_accumulate_grad_hooks", None) for g in optimizer.param_groups for p in g["params"]):
        raise ValueError(
            "register_post_accumulate_grad_hook: in a pipeline such a hook runs after each micro-batch, when the "
            "gradients of the batch are not complete; use on_before_optimizer_step"
        )


def check_changes(module: Module, optimizers: Iterable[Optimizer], known: Iterable[Tensor]) -> None:
    """The optimizers have no parameters but the known ones, and none has a hook that runs after each micro-batch."""
    managed = {id(parameter) for parameter in known}
    for optimizer in optimizers:
        check_accumulate_hooks(optimizer)
        new = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in managed]
        if new:
            names = [name for name, parameter in module.named_parameters() if parameter is new[0]]
            raise ValueError(
                f"{names[0] if names else f'a parameter of shape {tuple(new[0].shape)}'} has come to the optimizer "
                "while training runs, and a pipeline places parameters on its stages before that: make the layer in "
                "__init__ or configure_model, and freeze it until it is used; or use ring_ddp"
            )


def check_copies(module: pl.LightningModule, callbacks: Iterable[Callback], known: Sequence[Tensor]) -> None:
    """Neither a callback nor the module has copied known tensors whose values this rank lacks, as averages do."""
    shapes = {tensor.source: tensor.shape for tensor in known if isinstance(tensor, Placeholder)}
    own = {id(tensor) for tensor in known}
    for owner in (module, *callbacks):
        entries = list(tree_iter(vars(owner)))
        parts = [part for part in (owner, *entries) if isinstance(part, Module)]
        tensors = [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]
        for entry in (*entries, *tensors):
            # A placeholder of another shape is a value that a step has computed.
            copied = isinstance(entry, Placeholder) and entry.shape == shapes.get(entry.source)
            if copied and id(entry) not in own:
                raise ValueError(
                    f"{type(owner).__name__} keeps a copy of {entry.source}, whose values another stage of the "
                    "pipeline has: no stage can average or restore the whole model; leave that out, or use ring_ddp"
                )
