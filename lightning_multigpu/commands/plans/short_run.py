"""Short runs: a Trainer on one device with a :class:`.ProfilerReport`, in a forked process.

The process ends after the run, so that the module of the command stays as it is, and has not used a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from typing_extensions import override

from lightning_multigpu.callbacks import ProfilerReport
from lightning_multigpu.engine.tensor_split.blocks import find_blocks
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from lightning_multigpu.engine.tensor_split.trials import TracelessStep, Trials
from lightning_multigpu.report.document import RunDocument
from lightning_multigpu.report.schema import from_json
from lightning_multigpu.strategies.pipeline.pipeline_options import PipelineOptions
from lightning_multigpu.strategies.steps.dry_run import traceless, unlogged_loss

_TIMEOUT_S = 600.0
_ACTIVE = timedelta(seconds=3)
_SETTINGS: dict[str, Any] = {
    "devices": 1, "num_nodes": 1, "use_distributed_sampler": False, "max_epochs": -1, "max_steps": -1, "max_time": None,
    "min_epochs": None, "min_steps": None, "logger": False, "enable_checkpointing": False, "profiler": None,
    "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0, "limit_val_batches": 0,
    "fast_dev_run": False, "barebones": False, "limit_train_batches": None, "val_check_interval": None,
    "check_val_every_n_epoch": 1, "overfit_batches": 0.0,
}  # fmt: skip
"""Options of a Trainer that writes nothing, and does not end by itself."""


class ShortRunError(ValueError):
    """The module could not be trained; the message is the exception of its code."""


@dataclass(frozen=True, kw_only=True)
class PlannedModule:
    """What is measured: a module with its data, settings and callbacks of the Trainer, and options of a pipeline."""

    module: pl.LightningModule
    datamodule: pl.LightningDataModule | None
    trainer_settings: Mapping[str, Any]
    callbacks: Sequence[pl.Callback]
    device: torch.device
    pipeline_options: PipelineOptions | None = None

    @property
    def of_batches(self) -> list[pl.Callback]:
        """The callbacks that set the size of batches."""
        return [callback for callback in self.callbacks if hasattr(callback, "check_before_launch")]


Collectives = Sequence[tuple[str, int]]
"""Operation and bytes of each collective of a batch."""


def short_run(subject: PlannedModule, num_ranks: int = 1) -> tuple[RunDocument, Collectives]:
    """The profile of a module that one device trains for some seconds; it stays as it is.

    Call it before this process has used a GPU, and with one thread for operations.

    Args:
        num_ranks: ranks that split each layer, of which the first one's parts are trained.

    Returns:
        The profile; and the collectives in which parts of layers would take part.

    Raises:
        ShortRunError: the training step raises an error, there is no batch, or no layer can be split.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_train, args=(subject, num_ranks, theirs))
    process.start()
    theirs.close()
    try:
        answer = _answer(ours)
    finally:
        process.kill()
        process.join()
    if isinstance(answer, str):
        raise ShortRunError(answer)
    report, collectives = answer
    return from_json(RunDocument, report), collectives


def _answer(connection: Connection) -> Any:
    with suppress(EOFError, OSError):
        return connection.recv() if connection.poll(_TIMEOUT_S) else f"the run took longer than {_TIMEOUT_S:g} s"
    return "the process has died; see to it that fit would train on one device (memory)"


def _train(subject: PlannedModule, num_ranks: int, connection: Connection) -> None:
    """The process of a run, which never returns."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    is_whole = num_ranks == 1
    report = ProfilerReport(
        wait=3, active=_ACTIVE, trace=False, activations=True, for_plan=is_whole,
        print_table=False, write_file=False,
    )  # fmt: skip
    report.pipeline_options = subject.pipeline_options
    strategy = OneDevice(subject.device) if is_whole else FirstPart(subject.device, num_ranks)
    own = {
        "strategy": strategy, "callbacks": [*subject.of_batches, report, _End(report)],
        "accumulate_grad_batches": 1 + subject.module.automatic_optimization,
    }  # fmt: skip
    try:
        trainer = pl.Trainer(**{**subject.trainer_settings, **_SETTINGS, **own})
        trainer.fit(subject.module, datamodule=subject.datamodule)
        if report.report is None or "profile" not in report.report:
            raise ShortRunError(
                "the training loader has no batch to measure; see to it that fit would train on one device (data, "
                "limit_train_batches)"
            )
        connection.send((report.report, strategy.collectives))
    except BaseException as error:
        traceback.print_exc()
        text = str(error) if isinstance(error, ShortRunError) else f"{type(error).__name__}: {error}"
        with suppress(OSError):
            connection.send(text)
    os._exit(0)


class _End(pl.Callback):
    """Ends the run when its profile is complete."""

    def __init__(self, report: ProfilerReport) -> None:
        self._report = report

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        trainer.should_stop = self._report.is_over


class _Endless:
    """A loader that begins again at its end: the end of an epoch is not part of a step."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        batches = True
        while batches:
            batches = False
            for batch in self._loader:
                batches = True
                yield batch


class OneDevice(SingleDeviceStrategy):
    """Training on one device, in one epoch without an end."""

    collectives: Collectives = ()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return _Endless(dataloader)


class FirstPart(OneDevice):
    """Training of the first of ``num_ranks`` ranks that split each layer; nothing is sent."""

    def __init__(self, device: torch.device, num_ranks: int) -> None:
        super().__init__(device)
        self._group = TensorGroup(None, size=num_ranks)
        self._is_split = False

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        sent: list[tuple[str, int]] = []
        module = self.lightning_module
        assert module is not None
        if not self._is_split:
            self._is_split = True
            _split(module, self._group, partial(module.training_step, *args, **kwargs))
        self.collectives = sent  # of this batch: its backward adds to them
        self._group.observer = lambda operation, name, size_bytes: sent.append((operation, size_bytes))
        with self._group.showing(parts=False):
            return super().training_step(*args, **kwargs)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._group.showing(parts=True):  # within a step that optimizes manually, too
            return super().optimizer_step(*args, **kwargs)


def _split(module: pl.LightningModule, group: TensorGroup, step: Any) -> None:
    """Splits the blocks in which a step computes on parts.

    Raises:
        ShortRunError: no block can be split.
    """
    run = TracelessStep(
        module,
        group,
        lambda: unlogged_loss(module.trainer.precision_plugin, module, step),
        traceless=partial(traceless, module),
        gather=lambda value: [value],
        optimizes_manually=not module.automatic_optimization,
    )
    trials = Trials(run)
    trials.run(partial(find_blocks, module))
    if not trials.split:
        raise ShortRunError("no layer can be split")
