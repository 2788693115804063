"""Every name of Lightning that is not public and that we cannot do without, with the reason.

When Lightning moves one of them, ``tests/test_lightning_internals.py`` names it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

# CUDA that is in use cannot be forked.
from lightning.fabric.strategies.launchers.multiprocessing import _check_bad_cuda_fork as check_cuda_fork

# A script whose work is not under `if __name__ == "__main__"` would be run again by each spawned process.
from lightning.fabric.strategies.launchers.multiprocessing import _check_missing_main_guard as check_main_guard

# Parameters reach a spawned process in shared memory: each rank needs a copy of its own.
from lightning.fabric.strategies.launchers.multiprocessing import (
    _disable_module_memory_sharing as disable_module_memory_sharing,
)

# The command that runs this script again for a rank: see command_of_rank.
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd, _hydra_subprocess_cmd

# What Lightning's loading of a checkpoint passes on to torch.load: see LOADS_WEIGHTS_ONLY.
from lightning.fabric.utilities.cloud_io import _load as load_file

# Where a LightningModule keeps its device: see tell_device.
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin

# What Lightning does to intra-op threads before a rank starts; without it ranks share all cores and crawl.
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as set_num_threads_if_needed

# Lightning's own test for notebooks and REPLs: our launcher must agree with the check in Trainer.
from lightning.fabric.utilities.imports import _IS_INTERACTIVE as IS_INTERACTIVE
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks

# A validation is repeated where a rank is lost in it.
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop as EvaluationLoop

# The loops of a fit read `should_stop` between two hooks: ranks can agree on it only there.
from lightning.pytorch.loops.fit_loop import _FitLoop as FitLoop
from lightning.pytorch.loops.loop import _Loop

# A rank takes over the counters of another one in the middle of an epoch, where loading a checkpoint would begin
# the epoch anew.
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as TrainingEpochLoop

# Starts one copy of the script a rank; the command line of the copies (modules, hydra) is not public elsewhere.
# Trainer also checks for this class by name when it ends children after Ctrl-C.
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as MultiProcessingLauncher
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as SubprocessScriptLauncher

# What a spawned rank takes over from the process that starts it: random states, torch's deterministic settings.
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot as GlobalStateSnapshot

# What Lightning does at Ctrl-C; in spawned ranks it does nothing of it.
from lightning.pytorch.trainer.call import _interrupt as interrupt

# Ends a fit in its middle as a regular one: teardown hooks run, and no hook is told of a failure. Lightning's Tuner
# raises it, and so do we.
from lightning.pytorch.utilities.exceptions import _TunerExitException as EndOfRun
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

# The method of a precision plugin that calls the hooks before an optimizer's step and clips gradients, for every
# optimizer and precision: no public one stands behind all of those hooks.
HOOKS_BEFORE_STEP = "_after_closure"

# What Lightning gives torch.load where the user says nothing: False in Lightning 2.5, since then None, torch's default.
LOADS_WEIGHTS_ONLY: bool | None = inspect.signature(load_file).parameters["weights_only"].default

# The callbacks that average weights in a copy of the module; Lightning 2.5 has one of them.
WEIGHT_AVERAGES: tuple[type[Callback], ...] = tuple(
    getattr(callbacks, name) for name in ("StochasticWeightAveraging", "WeightAveraging") if hasattr(callbacks, name)
)

# The names of Lightning that other modules import from here.
__all__ = [
    "IS_INTERACTIVE",
    "EndOfRun",
    "EvaluationLoop",
    "FitLoop",
    "GlobalStateSnapshot",
    "MultiProcessingLauncher",
    "SubprocessScriptLauncher",
    "TrainingEpochLoop",
    "check_cuda_fork",
    "check_main_guard",
    "disable_module_memory_sharing",
    "interrupt",
    "set_num_threads_if_needed",
]


def writes_logs_after_this_batch(trainer: Trainer) -> bool:
    """True if Lightning writes the step's metrics to the loggers after the training batch that just ended.

    No public property says so. ``trainer.should_stop``, at which Lightning writes as well, is left out on purpose: a
    user may set it on one rank only, and a collective must not depend on that.
    """
    if trainer.fit_loop._should_accumulate() and trainer.lightning_module.automatic_optimization:
        return False
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by one of the Trainer's helpers
        return True
    interval = int(trainer.log_every_n_steps)  # type: ignore[attr-defined]  # likewise
    return interval > 0 and (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % interval == 0


def places_sampler(trainer: Trainer) -> bool:
    """True if Lightning puts its own sampler into the loaders of several ranks (``use_distributed_sampler``)."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def given_loaders(trainer: Trainer) -> list[DataLoader[Any]]:
    """The DataLoaders that were passed to the Trainer's method, and get a sampler for the ranks; not those of hooks.

    Lightning makes them anew, with the sampler, only after the strategy's setup.
    """
    if not places_sampler(trainer):
        return []
    loops: list[Any] = [trainer._active_loop]
    if trainer._active_loop is trainer.fit_loop:
        loops.append(trainer.fit_loop.epoch_loop.val_loop)
    sources = [loop._data_source for loop in loops if loop is not None]
    given = [leaf for source in sources if not source.is_module() for leaf in tree_leaves(source.instance)]
    return [
        loader
        for loader in given
        if isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not isinstance(loader.sampler, DistributedSampler)
    ]


def command_of_rank(local_rank: int) -> tuple[Sequence[str], str | None]:
    """The command that runs this script again, and its directory, as Lightning starts ranks; not public elsewhere."""
    hydra = sys.modules.get("hydra.core.hydra_config")
    if hydra is not None and hydra.HydraConfig.initialized():
        return _hydra_subprocess_cmd(local_rank)
    return _basic_subprocess_cmd(), None


def given_checkpoint(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """``ckpt_path`` among the arguments of the Trainer's method that a launcher is to run; None if not there.

    No hook before the launch is told what the user has passed to ``fit(ckpt_path=...)``.
    """
    return dict(zip(inspect.signature(function).parameters, args, strict=False)).get("ckpt_path")


def is_compiled(module: LightningModule) -> bool:
    """True if the steps of a module were compiled by ``torch.compile(module)``."""
    return module._compiler_ctx is not None


def tell_device(module: Module, device: torch.device) -> None:
    """Makes ``device`` what a replica of a LightningModule and its parts give as ``self.device``.

    They keep it apart from their tensors, and moving a module would move the parameters that replicas share.
    """
    for part in module.modules():
        if isinstance(part, _DeviceDtypeModuleMixin):
            part._device = device


def forget_loader_states(trainer: Trainer) -> None:
    """Leaves out the positions that a checkpoint has of loaders: Lightning would ask ours to load them."""
    trainer.fit_loop._combined_loader_states_to_load = []


def vars_of_saves(callback: callbacks.Checkpoint) -> dict[str, Any]:
    """What a ModelCheckpoint decides by and leaves out of its state, which is for a later run."""
    names = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
    return {name: vars(callback)[name] for name in names if name in vars(callback)}


def counters(loop: _Loop, path: str = "") -> dict[str, _BaseProgress]:
    """Lightning's counters of a loop and of the loops within it, by their paths."""
    found: dict[str, _BaseProgress] = {}
    for name, value in vars(loop).items():
        if isinstance(value, _BaseProgress):
            found[path + name] = value
        elif isinstance(value, _Loop):
            found |= counters(value, f"{path}{name}.")
    return found


def callback_metrics(trainer: Trainer) -> dict[str, Any]:
    """What ``trainer.callback_metrics`` is made of, to be changed."""
    return trainer._logger_connector._callback_metrics


@cache
def attributes_of_lightning() -> frozenset[str]:
    """Names of attributes that Lightning sets in a LightningModule."""
    # As a list: attributes of Lightning's may come and go. save_hyperparameters() makes those of hyperparameters.
    return frozenset((*vars(LightningModule()), "_hparams", "_hparams_name", "_hparams_initial"))


def plain_optimizer(optimizer: Any) -> Optimizer:
    """The user's optimizer, without Lightning's wrapper."""
    return getattr(optimizer, "_optimizer", optimizer)  # type: ignore[no-any-return]


def draws_graph(logger: Any) -> bool:
    """True if a logger runs the module's forward on ``example_input_array`` to draw a graph of it."""
    return bool(getattr(logger, "_log_graph", False))


@contextmanager
def logging_as(module: LightningModule, hook: str) -> Iterator[None]:
    """Within the block ``module.log`` counts as called from ``hook``, "training_step" for example.

    A pipeline runs the training step within its backward, where Lightning would file what it logs under "backward".
    """
    before, module._current_fx_name = module._current_fx_name, hook
    try:
        yield
    finally:
        module._current_fx_name = before


def has_set_signal_handlers(trainer: Trainer) -> bool:
    """True if Lightning has set its handlers for this run; it does so between ``on_fit_start`` and the first batch.

    A handler of ours that it finds there would keep it from setting its own, and it would give it back after the run.
    """
    return bool(trainer._signal_connector._original_handlers)


def restore_handler_at_teardown(trainer: Trainer, signum: int, handler: Any) -> None:
    """Lets Lightning give a signal back to ``handler``, and not to ours, which it has found at the start of the run.

    It puts back the handlers of all signals, also of those that it has never touched.
    """
    connector = trainer._signal_connector
    if signum in connector._original_handlers:
        connector._original_handlers[signum] = handler
