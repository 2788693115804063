"""The profile of a window of steps: where the time goes on every rank, and what would make the steps shorter."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_multigpu.callbacks.profile.model_figures import model_figures
from lightning_multigpu.callbacks.profile.profiled_window import ProfiledWindow
from lightning_multigpu.callbacks.run_report import RunReport
from lightning_multigpu.report import document, page
from lightning_multigpu.report.rank_figures import ModelFigures
from lightning_multigpu.strategies.pipeline.pipeline_options import PipelineOptions


class ProfilerReport(RunReport):
    """A :class:`RunReport` that profiles a window of optimizer steps, and says which parts of a step take its time.

    The report begins with what limits a step. It has the phases of a step for each rank (see
    :data:`.PHASES`) and the diagnosis: each reason for long steps with its evidence, its
    remedy, and the predicted step time with that remedy, the largest saving first. A saving below 5 % of a step is not
    shown. ``report.html``, beside ``multigpu_report.json``, is a page of it.

    The window is counted in optimizer steps: first ``wait`` steps, then ``active`` steps that are counted. Steps with a
    validation or the end of an epoch in them are replaced by later ones. With ``activations``, the activations that
    autograd keeps for backward are counted in one further step. With ``trace``, and on GPUs, torch's profiler records
    further steps, which show whether the host runs ahead of its GPU, and which functions wait for values of tensors.

    ``Trainer(profiler="pytorch")`` writes operators and their timelines; no steps are recorded beside it. Its steps
    take longer: keep its schedule apart from the window.

    The figures come from the actions that Lightning reports to its profiler, which still receives them, from the
    strategy's meter and the record of a pipeline's stages. On GPUs the phases are those of the host, which runs ahead
    of the device.

    Args:
        wait: optimizer steps before the window; the first ones pay for allocations and for what is compiled.
        active: steps that are counted; or the time for which they are, at least 5.
        trace: whether torch's profiler records steps, whose first start takes seconds. None: on GPUs.
        activations: whether the activations that autograd keeps for backward are counted in one step. Saved-tensor
            hooks count them: ``torch.func.grad`` and related functions raise an error under such hooks, and compiled
            layers may be compiled once more.
        for_plan: whether the profile has what ``lightning-multigpu plan --profile`` needs of one device: activations,
            and on the first batch trial steps that time gradients and layers. They leave the
            module as it was. On GPUs the host waits for the device between phases.
        print_table, write_file: as those of :class:`RunReport`, for both files.

    Raises:
        ValueError: ``wait`` is below 0, ``active`` below 1.
    """

    def __init__(
        self,
        *,
        wait: int = 6,
        active: int | timedelta = 10,
        trace: bool | None = None,
        activations: bool = False,
        for_plan: bool = False,
        print_table: bool = True,
        write_file: bool = True,
    ) -> None:
        super().__init__(print_table=print_table, write_file=write_file)
        for name, value, least in (("wait", wait, 0), ("active", active, 1)):
            if isinstance(value, int) and value < least:
                raise ValueError(f"{name}={value}: must be at least {least} optimizer steps")
        self.page_path: Path | None = None
        """The path of ``report.html``, on rank 0."""
        self._wait, self._active = wait, active
        self._trace, self._activations, self._for_plan = trace, activations or for_plan, for_plan
        self._window: ProfiledWindow | None = None
        self._model: ModelFigures | None = None
        self.pipeline_options: PipelineOptions | None = None
        """With ``for_plan``, options of the pipelines whose layers are timed; None for the defaults."""

    @property
    def is_over(self) -> bool:
        """Whether all that was asked for has been measured."""
        return self._window is not None and self._window.is_over

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        self._window = ProfiledWindow(
            trainer,
            self._wait,
            self._active,
            trace=self._trace,
            activations=self._activations,
            waits_for_device=self._for_plan,
        )
        self._view.record_stages()
        self._model = None
        super().on_train_start(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._for_plan and self._model is None:
            self._model = model_figures(trainer, batch, batch_idx, self.pipeline_options)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._window is not None:
            self._window.batches += 1
            if trainer.global_step != self._step:
                self._step = trainer.global_step
                self._window.step_ends()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._window is not None:
            self._window.interrupted = True

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._window is not None:
            self._window.interrupted = True

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if self._window is not None:
            self._window.close()
            if self._memory is not None:
                self._memory = replace(self._memory, activations_bytes=self._window.activations_bytes)

    @override
    def record(self, trainer: Trainer) -> document.RankRecord:
        record = super().record(trainer)
        if self._window is None:  # there was nothing to train on
            return record
        figures = self._window.figures(0 if self._memory is None else self._memory.parameters_bytes)
        return replace(record, profiled=replace(figures, model=self._model), stages=self._window.stages)

    @override
    def files(self, report: document.RunDocument) -> dict[str, bytes]:
        pages = {} if report.profile is None else {page.FILE_NAME: page.page(report).encode()}
        return {**super().files(report), **pages}

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_end(trainer, pl_module)
        has_profile = self.report is not None and "profile" in self.report
        self.page_path = self.path and (self.path.with_name(page.FILE_NAME) if has_profile else None)
        if self._window is not None and self.report is not None and not has_profile:
            rank_zero_warn(
                f"ProfilerReport profiled no step: training ended within the first {self._wait} steps, or each later "
                "step had a validation or the end of an epoch in it; pass a smaller wait, or train longer"
            )
        self._window = None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._abandon()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._abandon()

    @override
    def results(self) -> dict[str, Any]:
        return {**super().results(), "page_path": self.page_path}

    def _abandon(self) -> None:
        if self._window is not None:
            self._window.stop()
            self._window = None
