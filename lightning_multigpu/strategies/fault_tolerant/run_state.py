"""The state of a fit that a rank takes over from another one: weights, optimizers, and the place of the loops."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_multigpu._lightning_internals import callback_metrics, counters, vars_of_saves
from lightning_multigpu.strategies.fault_tolerant.dealing import DealtLoader

if TYPE_CHECKING:
    import lightning.pytorch as pl


def dealt_loader(trainer: pl.Trainer) -> DealtLoader | None:
    """The training loader of a fit."""
    loader = trainer.train_dataloader
    return loader if isinstance(loader, DealtLoader) else None


def given_state(trainer: pl.Trainer) -> dict[str, Any]:
    """The state of this rank; all ranks give and take theirs after the backward pass of a batch that ends a step."""
    loader = dealt_loader(trainer)
    assert loader is not None
    names = {parameter: name for name, parameter in trainer.lightning_module.named_parameters()}
    return {
        "trained": [name for parameter, name in names.items() if parameter.requires_grad],
        "groups": [
            [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
            for optimizer in trainer.strategy.optimizers
        ],
        "weights": trainer.lightning_module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.strategy.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "precision": trainer.precision_plugin.state_dict(),
        "saves": {each.state_key: vars_of_saves(each) for each in trainer.checkpoint_callbacks},
        "callbacks": {callback.state_key: callback.state_dict() for callback in trainer.callbacks},  # type: ignore[attr-defined]
        "counters": {name: counter.state_dict() for name, counter in counters(trainer.fit_loop).items()},
        "steps": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "metrics": dict(trainer.callback_metrics),
        "data": (loader.cursor, trainer.current_epoch),
    }


def take_state(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """Makes another rank's state that of this rank."""
    module, loader = trainer.lightning_module, dealt_loader(trainer)
    assert loader is not None
    with torch.no_grad():
        module.load_state_dict(state["weights"])
    named = dict(module.named_parameters())
    for name, parameter in named.items():  # which callbacks freeze and unfreeze
        parameter.requires_grad_(name in state["trained"])
    for optimizer, groups, of_optimizer in zip(
        trainer.strategy.optimizers, state["groups"], state["optimizers"], strict=True
    ):
        for names in groups[len(optimizer.param_groups) :]:
            optimizer.add_param_group({"params": [named[name] for name in names]})
        optimizer.load_state_dict(of_optimizer)
    for config, of_scheduler in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
        config.scheduler.load_state_dict(of_scheduler)
    trainer.precision_plugin.load_state_dict(state["precision"])
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        of_callback = state["callbacks"].get(callback.state_key)
        if of_callback:
            if isinstance(callback, ModelCheckpoint):
                callback.dirpath = of_callback["dirpath"]  # a rank that comes in alone has chosen another one
            callback.load_state_dict(of_callback)
    for checkpoint in trainer.checkpoint_callbacks:
        vars(checkpoint).update(state["saves"].get(checkpoint.state_key, {}))
    for name, counter in counters(trainer.fit_loop).items():
        counter.load_state_dict(state["counters"][name])
    trainer.fit_loop.epoch_loop._batches_that_stepped = state["steps"]
    callback_metrics(trainer).update(state["metrics"])
    loader.move(*state["data"])


def follow_members(trainer: pl.Trainer) -> None:
    """Tells Lightning's loop how many batches the epoch has with the members of now."""
    loader = dealt_loader(trainer)
    if loader is None or not trainer.training:
        return
    loop, fetcher = trainer.fit_loop, trainer.fit_loop._data_fetcher
    ready = loop.epoch_loop.batch_progress.current.ready
    loop.max_batches = ready + loader.left
    if fetcher is not None:
        fetcher.fetched, fetcher.length = ready, loop.max_batches
        fetcher.done = fetcher.fetched >= fetcher.length
    interval = trainer.val_check_interval
    if isinstance(interval, float) and not math.isinf(trainer.val_check_batch or 0):
        trainer.val_check_batch = max(1, int(loop.max_batches * interval))
