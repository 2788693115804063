"""Plants faults in a training job, so that its owner can see how it ends::

    from lightning_multigpu import faults

    L.Trainer(..., callbacks=[faults.at(rank=1, step=5).kill()])
    L.Trainer(..., callbacks=[faults.at(rank=0, where="validation").raise_(RuntimeError("out of luck"))])

The callbacks go into every rank's Trainer, as all callbacks do, and act on the one rank only. They work with every
strategy and launcher; ``rank`` is the global rank. A run that is resumed with the callback meets the fault again.
"""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, get_worker_info
from typing_extensions import override

from lightning_multigpu.strategies.validation import check_choice

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

Where = Literal["joining", "data", "training", "backward", "validation", "saving", "end of fit"]

PLACES: tuple[Where, ...] = get_args(Where)
_LARGEST_STATUS = 255


def at(*, rank: int, step: int = 0, where: Where = "training") -> Spot:
    """The place and time of a fault; one of the methods of the result says what happens there.

    ========== ========================================================================================================
    where      the fault happens
    ========== ========================================================================================================
    joining    before the rank joins its process group: the others wait for it. Takes no ``step``
    data       while a training batch is put together: in a worker of the DataLoader if it has workers, else in the rank
    training   at the start of a training batch
    backward   in the backward pass, as the gradient of the module's first parameter has been computed
    validation at the start of a validation batch, those of the sanity check included
    saving     while a checkpoint is gathered, which every rank takes part in; nothing of it has been written
    end of fit after the last batch, before the strategy's teardown
    ========== ========================================================================================================

    Args:
        rank: the global rank that it happens on.
        step: optimizer steps done before; the fault comes at the first occasion from then on, and only once. For
            ``"data"`` it is those that are done when the batch is trained on: batches may be put together earlier.
        where: see above.

    Raises:
        ValueError: a value is out of its range. A rank that the job does not have raises when the run starts; a fault
            whose time never came is warned of at the end.
    """
    _check_whole("rank", rank, "0 is the first rank")
    _check_whole("step", step, "0 is the first occasion")
    check_choice("where", where, PLACES)
    if where == "joining" and step:
        raise ValueError(f"step={step} with where='joining': no step is done before the ranks join; leave step out")
    return Spot(rank, step, where)


@dataclass(frozen=True)
class Spot:
    """A rank, a step and a place without a fault yet; made by :func:`at`.

    Every method returns a callback for ``Trainer(callbacks=[...])``. What it does happens to the process that ``where``
    names: the rank, or with ``"data"`` a worker of its DataLoader.
    """

    rank: int
    step: int
    where: Where

    def kill(self) -> PlantedFault:
        """The process dies at once (SIGKILL), as if it had used up the memory."""
        return self._signal(signal.SIGKILL)

    def stop(self) -> PlantedFault:
        """The process stands still with all its threads and keeps its connections (SIGSTOP)."""
        return self._signal(signal.SIGSTOP)

    def interrupt(self) -> PlantedFault:
        """The process receives SIGINT, as at Ctrl-C."""
        return self._signal(signal.SIGINT)

    def terminate(self) -> PlantedFault:
        """The process receives SIGTERM, as from a scheduler."""
        return self._signal(signal.SIGTERM)

    def hang(self) -> PlantedFault:
        """The main thread waits for ever; the process's other threads go on."""
        return self._planted("hangs", _hang)

    def exit(self, status: int) -> PlantedFault:
        """The process ends with an exit status, 0 to 255, and without cleaning up; see ``raise_`` for ``SystemExit``.

        Raises:
            ValueError: there is no such exit status.
        """
        _check_whole("status", status, "pass 1 for an ordinary failure")
        if status > _LARGEST_STATUS:
            raise ValueError(f"status={status} is above {_LARGEST_STATUS}, the largest exit status; pass a smaller one")
        return self._planted(f"exits with status {status}", _Exit(status))

    def raise_(self, error: BaseException) -> PlantedFault:
        """``error`` is raised; with a spawning launcher it has to be picklable.

        Raises:
            ValueError: ``error`` is no exception, or a class of exceptions.
        """
        if not isinstance(error, BaseException):
            raise ValueError(f"error={error!r} is not an exception; pass one, RuntimeError('planted') for example")
        return self._planted(f"raises {error!r}", _Raise(error))

    def _signal(self, number: signal.Signals) -> PlantedFault:
        return self._planted(f"receives {number.name}", _Signal(number))

    def _planted(self, what: str, action: Callable[[], None]) -> PlantedFault:
        return PlantedFault(Fault(self, what, action))


@dataclass(frozen=True)
class Fault:
    """What happens, and where; :meth:`strike` lets it happen to the process that calls it."""

    spot: Spot
    what: str
    action: Callable[[], None] = field(repr=False)

    def describe(self) -> str:
        """One line, in the log where the fault strikes: ``rank 1, training, from step 5 on: receives SIGKILL``."""
        after = f", from step {self.spot.step} on" if self.spot.step else ""
        return f"rank {self.spot.rank}, {self.spot.where}{after}: {self.what}"

    def strike(self) -> None:
        """Says so in the log and lets it happen."""
        log.warning("Planted fault, pid %d: %s", os.getpid(), self.describe())
        self.action()


class PlantedFault(Callback):
    """The callback that lets a :class:`Fault` happen; made by the methods of :class:`Spot`."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._struck = False
        self._log: Any = None
        self._collates: list[_FaultyCollate] = []
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
        if self.fault.spot.where == "joining":
            trainer = function.__self__.trainer
            # A spawned process learns its rank as it joins; told twice, it is the same.
            if hasattr(trainer.strategy, "set_world_ranks"):
                trainer.strategy.set_world_ranks()
            self._occasion("joining", trainer)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        rank = self.fault.spot.rank
        if rank >= trainer.world_size:
            raise ValueError(
                f"rank={rank} of a planted fault is out of range: the job has the ranks 0 to {trainer.world_size - 1}; "
                "pass one of them, or start more"
            )
        if self.fault.spot.where == "data" and rank == trainer.global_rank:
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
        spot = self.fault.spot
        # Workers of a DataLoader do not tell whether it happened in them.
        struck = trainer.global_step > spot.step if spot.where == "data" else self._struck
        if stage == "fit" and trainer.global_rank == spot.rank and not struck:
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
            collate = _FaultyCollate(loader.collate_fn, self.fault)
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
            while isinstance(loader.collate_fn, _FaultyCollate):
                loader.collate_fn = loader.collate_fn.inner
        self._loaders, self._collates = [], []

    def _is_occasion(self, where: Where, trainer: pl.Trainer) -> bool:
        spot = self.fault.spot
        here = spot.where == where and spot.rank == trainer.global_rank
        return here and not self._struck and trainer.global_step >= spot.step

    def _occasion(self, where: Where, trainer: pl.Trainer) -> None:
        if self._is_occasion(where, trainer):
            self._struck = True
            self.fault.strike()


@dataclass
class _FaultyCollate:
    """A collate function with a fault in one of its batches; workers of the loader hold copies of it."""

    inner: Callable[[Any], Any]
    fault: Fault
    batch: int = 0
    calls: int = 0
    struck: bool = False

    def aim(self, trainer: pl.Trainer) -> None:
        """Finds the batch of the coming epoch that the fault's step trains on; a negative number if that is over."""
        self.batch = (self.fault.spot.step - trainer.global_step) * trainer.accumulate_grad_batches
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


@dataclass(frozen=True)
class _Signal:
    number: signal.Signals

    def __call__(self) -> None:
        os.kill(os.getpid(), self.number)


@dataclass(frozen=True)
class _Exit:
    status: int

    def __call__(self) -> None:
        os._exit(self.status)


@dataclass(frozen=True)
class _Raise:
    error: BaseException

    def __call__(self) -> None:
        raise self.error


def _hang() -> None:
    while True:
        time.sleep(3600)


def _check_whole(name: str, value: object, hint: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}={value!r} is not a whole number of 0 or more; {hint}")
