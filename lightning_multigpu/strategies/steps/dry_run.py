"""Dry runs of the user's steps: they measure or check a step, and leave no trace."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import rank_zero_info

from lightning_multigpu.engine.data_parallel.agreement import LossReduction
from lightning_multigpu.engine.micro_batches import cloned
from lightning_multigpu.engine.parity import CAUSES, Gather, coupling, rounding_of
from lightning_multigpu.engine.replaced_attributes import replaced
from lightning_multigpu.engine.step_state import preserved_random_state, preserved_state, seed_of, set_random_state

if TYPE_CHECKING:
    import lightning.pytorch as pl


def check_takes_batch(module: pl.LightningModule) -> None:
    """Raises ValueError for a training step that takes batches by itself: a dry run would take some from training."""
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ValueError(
            f"{type(module).__name__}.training_step takes dataloader_iter, and the step also runs on trial, which "
            "needs the batch: take batch instead"
        )


@contextmanager
def without_trace(module: pl.LightningModule) -> Iterator[None]:
    """Restores at the end of the block random states, the module's buffers and attributes, and ``should_stop``.

    Within the block the Trainer's loggers do nothing, and warnings are silenced: the training step repeats them.
    Changes of other objects stay.
    """
    trainer = module.trainer
    stops, loggers = trainer.should_stop, trainer.loggers
    with preserved_random_state(module.device), preserved_state(module), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.loggers = [DummyLogger() for _ in loggers]
        try:
            yield
        finally:
            trainer.should_stop, trainer.loggers = stops, loggers


def _only_closure(closure: Any = None, *_: Any, **__: Any) -> Any:
    return closure() if callable(closure) else None


@contextmanager
def without_updates(module: pl.LightningModule) -> Iterator[None]:
    """Within the block a step that optimizes manually runs backward, and updates neither weights nor schedulers.

    Optimizers run the closures that they get. Values of parameters that the step's own code changes are restored.
    """
    known = (module.optimizers(), module.optimizers(use_pl_optimizer=False), module.lr_schedulers())
    stepping = [each for some in known if some is not None for each in (some if isinstance(some, list) else [some])]
    parameters = [*module.parameters()]
    values = [parameter.data.clone() for parameter in parameters]
    try:
        with ExitStack() as undo:
            undo.enter_context(replaced(module, manual_backward=lambda loss, *args, **kw: loss.backward(*args, **kw)))
            for each in stepping:
                undo.enter_context(replaced(each, step=_only_closure))
            yield
    finally:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data.copy_(value)


@contextmanager
def traceless(module: pl.LightningModule) -> Iterator[None]:
    """Both: a block for steps of any module, at whose end the module and random states are as before it."""
    with without_trace(module), nullcontext() if module.automatic_optimization else without_updates(module):
        yield


def unlogged_loss(plugin: Precision, module: pl.LightningModule, call: Callable[[], Any]) -> Any:
    """The loss of a training step that ``call`` runs, under the Trainer's precision; logs are dropped."""
    with replaced(module, log=lambda *args, **options: None), plugin.train_step_context():
        output = call()
    return output.get("loss") if isinstance(output, Mapping) else output


def rounding(module: pl.LightningModule, device: torch.device) -> float:
    """What rounding explains of gradients of the module under the Trainer's precision; see :func:`.rounding_of`."""
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    half = {torch.bfloat16} if "16" in module.trainer.precision or "transformer" in module.trainer.precision else set()
    return rounding_of({*dtypes, *half}, device)


def check_share(
    module: pl.LightningModule,
    batch: Any,
    *others: Any,
    reduction: LossReduction,
    gather: Gather,
    rank: int,
    loss_scale: float,
) -> None:
    """Compares the gradients of two halves of a rank's batch with those of the batch; a collective.

    See :func:`.coupling`. Gradients have to stay on their ranks meanwhile.

    Args:
        others: the further arguments of ``training_step``.
        reduction: how the step reduces the losses of a batch.
        gather: gathers an object of every rank, in rank order.
        loss_scale: the factor of losses under the gradient scaler.

    Raises:
        ValueError: on all ranks, the gradients do not add up.
    """
    plugin, device = module.trainer.precision_plugin, module.device

    def run(part: Any, weight: float) -> None:
        set_random_state(seed_of(0, rank), device)
        loss = unlogged_loss(plugin, module, partial(module.training_step, cloned(part), *others))
        if loss is not None:
            (loss * (weight * loss_scale)).backward()

    given = partial(without_trace, module), reduction, rounding(module, device)
    cause, found = coupling(module, batch, 2, run, *given, gather=gather)
    if cause == "coupled":
        raise ValueError(CAUSES["shares"].format(found=found))
    if found:
        rank_zero_info(f"verify_steps: {found}.")
