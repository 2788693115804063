"""Faults planted in a training job, to see how the job ends: ``callbacks=[faults.plant(faults.hang, rank=1, step=5)]``.

The callbacks go into every rank's Trainer and act on the one rank only, with every strategy and launcher.
"""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, get_worker_info

log = logging.getLogger(__name__)

Where = Literal["joining", "data", "training", "backward", "validation", "saving", "end of fit"]
PLACES: tuple[Where, ...] = get_args(Where)


@dataclass(frozen=True)
class Fault:
    """A fault of one rank; :meth:`strike` lets it happen to the process that calls it."""

    action: Callable[[], object]
    rank: int
    step: int
    where: Where

    def strike(self) -> None:
        log.warning("Planted fault, pid %d: %s", os.getpid(), self)
        self.action()


def plant(action: Callable[[], object], *, rank: int, step: int = 0, where: Where = "training") -> "PlantedFault":
    """A callback that calls ``action`` once on one rank, at the first occasion after ``step`` optimizer steps.

    With a spawning launcher ``action`` has to be picklable. The values of ``where``:

    - "joining": before the rank joins its process group, while the others wait for it. It takes no ``step``.
    - "data": while the batch of that step is put together, in a worker of the DataLoader if it has workers.
    - "training": at the start of a training batch.
    - "backward": in the backward pass, when the gradient of the module's first parameter has been computed.
    - "validation": at the start of a validation batch, those of the sanity check included.
    - "saving": while all ranks gather a checkpoint, before anything of it has been written.
    - "end of fit": after the last batch, before the strategy's teardown.
    """
    assert where in PLACES, where
    kind = {"backward": _FaultInBackward, "saving": _FaultInSaving}.get(where, PlantedFault)
    return kind(Fault(action, rank, step, where))


class PlantedFault(Callback):
    """The callback that lets a fault happen; made by :func:`plant`."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._struck = False
        self._log: Any = None
        self._collates: list[FaultyCollate] = []

    @property
    def log(self) -> Any:
        """Lightning's logging function. To receive it is the one thing that comes to a callback before joining."""
        return self._log

    @log.setter
    def log(self, function: Any) -> None:
        self._log = function
        if self.fault.where == "joining":
            trainer = function.__self__.trainer
            # A spawned process learns its rank as it joins; told twice, it is the same.
            if hasattr(trainer.strategy, "set_world_ranks"):
                trainer.strategy.set_world_ranks()
            self._occasion("joining", trainer)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        assert self.fault.rank < trainer.world_size, self.fault
        if self.fault.where == "data" and self.fault.rank == trainer.global_rank:
            # The loader's iterator exists before any hook of training, and keeps the collate function that it has then.
            strategy: Any = trainer.strategy
            strategy.process_dataloader = partial(self._plant_in_loader, trainer, strategy.process_dataloader)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for collate in self._collates:
            collate.aim(trainer)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._occasion("training", trainer)

    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._occasion("validation", trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._occasion("end of fit", trainer)

    def _plant_in_loader(self, trainer: pl.Trainer, process: Callable[[Any], Any], loader: Any) -> Any:
        if trainer.training:
            assert isinstance(loader, DataLoader), loader
            collate = FaultyCollate(loader.collate_fn, self.fault)
            collate.aim(trainer)
            collate.batch = max(0, collate.batch)  # a resumed run may begin behind the step
            self._collates.append(collate)
            loader.collate_fn = collate
        return process(loader)

    def _is_occasion(self, where: Where, trainer: pl.Trainer) -> bool:
        fault = self.fault
        here = fault.where == where and fault.rank == trainer.global_rank
        return here and not self._struck and trainer.global_step >= fault.step

    def _occasion(self, where: Where, trainer: pl.Trainer) -> None:
        if self._is_occasion(where, trainer):
            self._struck = True
            self.fault.strike()


class _FaultInBackward(PlantedFault):
    """Apart, since strategies prepare gradients for a callback that has these hooks."""

    _armed: torch.utils.hooks.RemovableHandle | None = None

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        first = next((parameter for parameter in pl_module.parameters() if parameter.requires_grad), None)
        if self._is_occasion("backward", trainer) and first is not None:
            register: Any = first.register_hook
            self._armed = register(lambda gradient: self._occasion("backward", trainer))

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._armed is not None:
            self._armed.remove()
            self._armed = None
        self._occasion("backward", trainer)  # where the first parameter has got no gradient


class _FaultInSaving(PlantedFault):
    """Apart, since strategies gather a whole checkpoint for a callback that has this hook."""

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        self._occasion("saving", trainer)


@dataclass
class FaultyCollate:
    """A collate function with a fault in one of its batches; workers of the loader hold copies of it."""

    inner: Callable[[Any], Any]
    fault: Fault
    batch: int = 0
    calls: int = 0
    struck: bool = False

    def aim(self, trainer: pl.Trainer) -> None:
        """Finds the batch of the coming epoch that the fault's step trains on; a negative number if that is over."""
        self.batch = (self.fault.step - trainer.global_step) * trainer.accumulate_grad_batches
        self.calls = 0

    def __call__(self, samples: Any) -> Any:
        worker = get_worker_info()
        # Workers put batches together in turn.
        batch = self.calls if worker is None else self.calls * worker.num_workers + worker.id
        self.calls += 1
        if batch == self.batch and not self.struck:
            self.struck = True
            self.fault.strike()
        return self.inner(samples)


def raise_error(error: BaseException) -> None:
    raise error


def hang() -> None:
    while True:
        time.sleep(3600)
