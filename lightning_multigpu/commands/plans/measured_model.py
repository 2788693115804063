"""The figures of a user's model for a plan: short runs on one device with a :class:`.ProfilerReport`.

Each run is a Trainer in a forked process, which ends with it, so that the module of the command stays as it is, and has
not used a GPU. The first one trains the whole model alone; others train it beside copies, or the first part of split
layers.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from math import inf
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from typing_extensions import override

from lightning_multigpu.callbacks import ProfilerReport
from lightning_multigpu.callbacks.other_processes import share_of_others, usage
from lightning_multigpu.engine.tensor_split.blocks import find_blocks
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from lightning_multigpu.engine.tensor_split.trials import TracelessStep, Trials
from lightning_multigpu.planning.pipelines.timeline import HeldBytes
from lightning_multigpu.planning.scaling.machine import QUIET
from lightning_multigpu.planning.scaling.model_profile import ModelProfile, Phases, SplitPart
from lightning_multigpu.report.document import RunDocument
from lightning_multigpu.report.rank_figures import RankFigures
from lightning_multigpu.report.schema import ReportError, from_json
from lightning_multigpu.strategies.pipeline.pipeline_options import PipelineOptions
from lightning_multigpu.strategies.steps.dry_run import traceless, unlogged_loss

_TIMEOUT_S = 600.0
_ACTIVE = _BARE = timedelta(seconds=2)
_FEWEST = 5
_ATTEMPTS = 3
_OURS = ("ProfilerReport.", "ThroughputMonitor.", "CommunicationMonitor.", "DeviceUtilizationMonitor.")
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


@dataclass(frozen=True)
class ShortRun:
    """A profile; operation and bytes of each collective in which parts of layers would take part in a batch; the share
    that other processes took; and the step after the profile, 0 if it is not known.
    """

    document: RunDocument
    collectives: Sequence[tuple[str, int]] = ()
    others: float = 0.0
    bare_step_s: float = 0.0

    @property
    def phases(self) -> Phases:
        """The step of one batch, as long as without the profile's records."""
        assert self.document.profile is not None
        [rank] = self.document.profile.ranks
        profiled_s, ours_s = sum(rank.phases_s.values()), _ours_s(rank)
        bare_s = (self.bare_step_s or profiled_s) - ours_s
        return phases_of(self.document).times(bare_s / (profiled_s - ours_s))


def measured_model(
    subject: PlannedModule,
    sizes: Iterable[int],
    crowds: Iterable[int] = (),
    *,
    limit_bytes: float = inf,
    tell: Callable[[str], object] = lambda what: None,
) -> ModelProfile:
    """The figures of a model, whose layers may be split over ``sizes`` ranks; its weights do not change.

    Args:
        crowds: numbers of ranks that compute at once on one machine's cores.
        limit_bytes: of a rank; a larger model is not measured beside copies, nor one whose copies die.
        tell: called with what is measured next.

    Raises:
        ShortRunError: the training step raises an error on one device, or there is no batch.
    """

    disturbed: list[float] = []

    def quiet(what: str, **options: int) -> ShortRun:
        """The least disturbed of up to three runs; one where others take little."""
        tried: list[ShortRun] = []
        while len(tried) < _ATTEMPTS and (not tried or min(run.others for run in tried) > QUIET):
            tell(f"{what}, again: other processes are busy" if tried else what)
            tried.append(short_run(subject, **options))
        best = min(tried, key=lambda run: run.others)
        disturbed.append(best.others)
        return best

    whole = quiet("the whole model, and its layers one by one")
    alone = whole.phases
    slowdown: dict[int, float] = {}
    held, activations = _memory(whole.document)
    for crowd in crowds if held.total + activations <= limit_bytes else ():
        try:
            beside = quiet(f"the model beside {crowd - 1} others", copies=crowd).phases
        except ShortRunError:  # the model alone has trained: its copies do not fit
            continue
        seconds = [phases.forward_s + phases.backward_s for phases in (beside, alone)]
        slowdown[crowd] = max(1.0, seconds[0] / seconds[1])
    refused: dict[str, str] = {}
    splits: dict[int, SplitPart] = {}
    for size in sizes:
        try:
            part = quiet(f"its layers split over {size} ranks", num_ranks=size)
        except ShortRunError as error:
            refused[f"tensor_split on {size} ranks"] = str(error)
        else:
            held, activations = _memory(part.document)
            splits[size] = SplitPart(
                phases=part.phases, collectives=part.collectives, held=held, activations_bytes=activations
            )
    return model_of(
        whole.document, phases=alone, splits=splits, refused=refused, slowdown=slowdown, disturbed=max(disturbed),
        divides_batch=bool(subject.of_batches),
    )  # fmt: skip


def model_of(
    document: RunDocument, *, refused: Mapping[str, str], phases: Phases | None = None, **further: Any
) -> ModelProfile:
    """The model of a profile of one device, with further fields of :class:`.ModelProfile`.

    Raises:
        ReportError: the profile is of several ranks, or lacks the figures for a plan.
    """
    model = document.profile.ranks[0].model if document.profile is not None else None
    if document.world.size > 1 or model is None:
        raise ReportError(
            "this is no profile of one device for plans; train on one device with ProfilerReport(for_plan=True)"
        )
    held, activations = _memory(document)
    return ModelProfile(
        name=document.model.class_.rpartition(".")[2],
        samples=model.samples,
        parameters=document.model.parameters,
        held=held,
        activations_bytes=activations,
        gradients=model.gradients or [(held.gradients_bytes, 1.0)],
        phases=phases or phases_of(document),
        chain=model.chain,
        refused={**({"pipelines": model.refused} if model.refused else {}), **refused},
        **further,
    )


def phases_of(document: RunDocument) -> Phases:
    """The step of one batch; callbacks of the profile itself do not count."""
    assert document.profile is not None
    [rank] = document.profile.ranks
    return Phases(
        forward_s=rank.of("forward") / rank.batches,
        backward_s=(rank.of("backward") - (rank.batches - 1) * rank.adding_s) / rank.batches,
        optimizer_s=rank.of("optimizer"),
        input_s=rank.of("data_wait", "device_transfer") / rank.batches,
        adding_s=rank.adding_s,
        other_s=max(0.0, rank.of("callbacks", "other") - _ours_s(rank)) / rank.batches,
    )


def _ours_s(rank: RankFigures) -> float:
    """Seconds of a step in the profile's own callbacks."""
    return sum(seconds for name, seconds in rank.callbacks_s.items() if name.startswith(_OURS))


def _memory(document: RunDocument) -> tuple[HeldBytes, int]:
    """What the device held, and saved for backward."""
    assert document.memory is not None
    [held] = document.memory
    kinds = HeldBytes(held.parameters_bytes, held.gradients_bytes, held.optimizer_bytes)
    return kinds, held.activations_bytes or 0


def short_run(subject: PlannedModule, num_ranks: int = 1, copies: int = 1) -> ShortRun:
    """Trains a module on one device for some seconds; it stays as it is.

    Call it before this process has used a GPU, and with one thread for operations.

    Args:
        num_ranks: ranks that split each layer, of which the first one's parts are trained.
        copies: processes that train at once, each the whole module; the first one's profile counts.

    Raises:
        ShortRunError: the training step raises an error, there is no batch, or no layer can be split.
    """
    before = usage([subject.device.index or 0] if subject.device.type == "cuda" else [])
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    processes = [
        context.Process(target=_train, args=(subject, num_ranks, copies == 1, theirs if copy == 0 else None))
        for copy in range(copies)
    ]
    for process in reversed(processes):
        process.start()
    theirs.close()
    try:
        answer = _answer(ours)
        if any(copy.exitcode is not None for copy in processes[1:]):
            answer = "a copy of the model beside it has died"
        others = share_of_others([before], [usage()])
    finally:
        for process in processes:
            process.kill()
            process.join()
    if isinstance(answer, str):
        raise ShortRunError(answer)
    report, collectives, bare_step_s = answer
    return ShortRun(from_json(RunDocument, report), collectives, others, bare_step_s)


def _answer(connection: Connection) -> Any:
    with suppress(EOFError, OSError):
        return connection.recv() if connection.poll(_TIMEOUT_S) else f"the run took longer than {_TIMEOUT_S:g} s"
    return "the process has died; see to it that fit would train on one device (memory)"


def _train(subject: PlannedModule, num_ranks: int, is_alone: bool, connection: Connection | None) -> None:
    """The process of a run, which never returns; one without a connection trains until it is ended."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    is_whole = num_ranks == 1
    report = ProfilerReport(
        wait=3, active=_ACTIVE, trace=False, activations=is_alone, for_plan=is_whole and is_alone,
        print_table=False, write_file=False,
    )  # fmt: skip
    report.pipeline_options = subject.pipeline_options
    strategy = OneDevice(subject.device) if is_whole else FirstPart(subject.device, num_ranks)
    end = _End(report)
    own = {
        "strategy": strategy, "callbacks": [*subject.of_batches, *([report, end] if connection else [])],
        "accumulate_grad_batches": 1 + subject.module.automatic_optimization,
    }  # fmt: skip
    answer: Any = "the training loader has no batch to measure; see to it that fit would train on one device (data, "
    answer += "limit_train_batches)"
    try:
        trainer = pl.Trainer(**{**subject.trainer_settings, **_SETTINGS, **own})
        trainer.fit(subject.module, datamodule=subject.datamodule)
        if report.report is not None and "profile" in report.report:
            answer = report.report, strategy.collectives, end.bare_step_s
    except BaseException as error:
        traceback.print_exc()
        answer = str(error) if isinstance(error, ShortRunError) else f"{type(error).__name__}: {error}"
    if connection is not None:
        with suppress(OSError):
            connection.send(answer)
    os._exit(0)


class _End(pl.Callback):
    """Ends the run some steps after its profile is complete: those are as long as without it."""

    def __init__(self, report: ProfilerReport) -> None:
        self._report = report
        self._step = 0
        self._ends_s: list[float] = []

    @property
    def bare_step_s(self) -> float:
        return median(end_s - start_s for start_s, end_s in pairwise(self._ends_s)) if self._ends_s[1:] else 0.0

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._report.is_over and trainer.global_step != self._step:
            self._ends_s.append(time.perf_counter())
            trainer.should_stop = (
                len(self._ends_s) > _FEWEST and self._ends_s[-1] - self._ends_s[0] > _BARE.total_seconds()
            )
        self._step = trainer.global_step


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

    collectives: Sequence[tuple[str, int]] = ()

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
