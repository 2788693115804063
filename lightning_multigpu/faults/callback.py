"""The callback that makes a fault happen on its rank, at its step and in its place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, get_worker_info
from typing_extensions import override

from lightning_multigpu.faults.fault import Fault, Where

if TYPE_CHECKING:
    import lightning.pytorch as pl


class PlantedFault(Callback):
    """The callback that lets a fault happen; made by the methods of :class:`~lightning_multigpu.faults.Spot`."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._struck = False
        self._log: Any = None
        self._collates: list[FaultyCollate] = []
        self._loaders: list[DataLoader[Any]] = []
        self._armed: torch.utils.hooks.RemovableHandle | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.fault.describe()})"

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

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        rank = self.fault.rank
        if rank >= trainer.world_size:
            raise ValueError(
                f"rank={rank} of a planted fault is out of range: the job has the ranks 0 to {trainer.world_size - 1}; "
                "pass one of them, or start more"
            )
        if self.fault.where == "data" and rank == trainer.global_rank:
            # The loader's iterator exists before any hook of training, and keeps the collate function that it has then.
            strategy: Any = trainer.strategy
            strategy.process_dataloader = partial(self._plant_in_loader, trainer, strategy.process_dataloader)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for collate in self._collates:
            collate.aim(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._withdraw(trainer)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._occasion("training", trainer)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        first = next((parameter for parameter in pl_module.parameters() if parameter.requires_grad), None)
        if self._is_occasion("backward", trainer) and first is not None:
            register: Any = first.register_hook
            self._armed = register(lambda gradient: self._occasion("backward", trainer))

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._armed is not None:
            self._armed.remove()
            self._armed = None
        self._occasion("backward", trainer)  # where the first parameter has got no gradient

    @override
    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._occasion("validation", trainer)

    @override
    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        self._occasion("saving", trainer)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._occasion("end of fit", trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        fault = self.fault
        # Workers of a DataLoader do not tell whether it happened in them.
        struck = trainer.global_step > fault.step if fault.where == "data" else self._struck
        if stage == "fit" and trainer.global_rank == fault.rank and not struck:
            warnings.warn(
                f"A planted fault never happened ({self.fault.describe()}): the run ended after {trainer.global_step} "
                "steps; give it an earlier step, or a place that the run comes to",
                stacklevel=2,
            )
        self._withdraw(trainer)

    def _plant_in_loader(self, trainer: pl.Trainer, process: Callable[[Any], Any], loader: Any) -> Any:
        if trainer.training:
            if not isinstance(loader, DataLoader):
                raise ValueError(
                    f"where='data' needs a torch DataLoader, whose collate_fn the fault goes into; training batches "
                    f"come from a {type(loader).__name__}. Use where='training', or raise in the iterable itself"
                )
            collate = FaultyCollate(loader.collate_fn, self.fault)
            collate.aim(trainer)
            collate.batch = max(0, collate.batch)  # a resumed run may begin behind the step
            self._collates.append(collate)
            self._loaders.append(loader)
            loader.collate_fn = collate
        return process(loader)

    def _withdraw(self, trainer: pl.Trainer) -> None:
        """Gives the user's loader its own collate function back."""
        vars(trainer.strategy).pop("process_dataloader", None)
        for loader in self._loaders:
            while isinstance(loader.collate_fn, FaultyCollate):
                loader.collate_fn = loader.collate_fn.inner
        self._loaders, self._collates = [], []

    def _is_occasion(self, where: Where, trainer: pl.Trainer) -> bool:
        fault = self.fault
        here = fault.where == where and fault.rank == trainer.global_rank
        return here and not self._struck and trainer.global_step >= fault.step

    def _occasion(self, where: Where, trainer: pl.Trainer) -> None:
        if self._is_occasion(where, trainer):
            self._struck = True
            self.fault.strike()


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
