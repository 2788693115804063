"""The profile of a window of steps: where the time goes on every rank, and what would make the steps shorter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_multigpu.callbacks.device_utilization import DeviceUtilizationMonitor
from lightning_multigpu.callbacks.profile.profiled_window import ProfiledWindow
from lightning_multigpu.callbacks.run_report import gather, is_fast_dev_run, versions_of
from lightning_multigpu.callbacks.silent_monitors import SilentMonitors
from lightning_multigpu.callbacks.strategy_identity import identify, strategy_options
from lightning_multigpu.callbacks.throughput import ThroughputMonitor
from lightning_multigpu.engine.parameter_server.server_statistics import ServerStatistics
from lightning_multigpu.report import document
from lightning_multigpu.report.profile import (
    profile_document,
    profile_of_ranks,
    profile_page,
    profile_sections,
    profile_text,
)
from lightning_multigpu.report.schema import as_json
from lightning_multigpu.strategies.base import MultiGPUStrategy


class ProfilerReport(SilentMonitors):
    """Profiles a window of optimizer steps on all ranks, and says which parts of a step take its time.

    At the end of training rank 0 prints the phases of a step for each rank (see
    :mod:`lightning_multigpu.planning.step_phases`), and the diagnosis: each reason for long steps with its evidence,
    its remedy, and the predicted step time with that remedy, the largest saving first. A saving below 5 % of a step is
    not shown. The same is written to ``report.html``, a page with pictures, and to ``profile.json`` (see
    :class:`~lightning_multigpu.report.profile.profile_document.ProfileDocument`), both in ``trainer.log_dir``, else
    ``trainer.default_root_dir``.

    The window is counted in optimizer steps: first ``wait`` steps, then ``warmup`` steps that are recorded but not
    counted, then ``active`` steps that are counted. Steps with a validation or the end of an epoch in them are
    replaced by later ones. With ``activations``, the activations that autograd keeps for backward are counted in one
    further step. With ``operators``, and on GPUs, torch's profiler records two further steps: each rank writes the
    trace of the first, ``trace_rank0.json.gz`` and so on, for https://ui.perfetto.dev, which opens several at once; the
    second one shows which functions wait for values of tensors. Throughput, utilization and memory in use are those of
    the whole run, from the Trainer's :class:`ThroughputMonitor` and :class:`DeviceUtilizationMonitor`, or from silent
    ones.

    Of several in one Trainer, only the first one profiles: two windows would count each other's measuring.

    With ``Trainer(profiler="pytorch")``, whose profiler writes operators itself, none are recorded beside it. Its steps
    take longer: keep its schedule apart from the window.

    The figures come from the actions that Lightning reports to its profiler, which still receives them, from the
    strategy's meter and the record of a pipeline's stages. On GPUs the phases are those of the host, which runs ahead
    of the device.

    Args:
        wait: optimizer steps before the window; the first ones pay for allocations and for what is compiled.
        warmup: steps at its beginning that are not counted.
        active: steps that are counted.
        operators: whether two steps are recorded by torch's profiler, whose first start takes seconds. None: on GPUs,
            where it tells whether the host runs ahead of its GPU, and what makes it wait.
        activations: whether the activations that autograd keeps for backward are counted in one step. Saved-tensor
            hooks count them: ``torch.func.grad`` and related functions raise an error under such hooks, and compiled
            layers may be compiled once more.
        print_report: whether rank 0 prints the report.
        write_files: whether rank 0 writes the files.

    Raises:
        ValueError: ``wait`` or ``warmup`` is below 0, ``active`` below 1.
    """

    def __init__(
        self,
        *,
        wait: int = 5,
        warmup: int = 1,
        active: int = 10,
        operators: bool | None = None,
        activations: bool = False,
        print_report: bool = True,
        write_files: bool = True,
    ) -> None:
        super().__init__()
        for name, value, least in (("wait", wait, 0), ("warmup", warmup, 0), ("active", active, 1)):
            if value < least:
                raise ValueError(f"{name}={value}: must be at least {least} optimizer steps")
        self.profile: dict[str, Any] | None = None
        """The newest profile, as a dictionary, on rank 0."""
        self.path: Path | None = None
        """The path of ``profile.json``, on rank 0."""
        self.page_path: Path | None = None
        """The path of ``report.html``, on rank 0."""
        self._wait, self._warmup, self._active = wait, warmup, active
        self._first = wait + warmup
        self._operators, self._activations = operators, activations
        self._print_report = print_report
        self._write_files = write_files
        self._window: ProfiledWindow | None = None
        self._gathered: list[Any] | None = None
        self._servers: ServerStatistics | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._monitors = (self.monitor(trainer, ThroughputMonitor), self.monitor(trainer, DeviceUtilizationMonitor))
        self._servers, self._gathered = None, None
        self._directory = trainer.log_dir or trainer.default_root_dir  # a broadcast: every rank must ask

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reports = [c for c in trainer.callbacks if isinstance(c, ProfilerReport)]  # type: ignore[attr-defined]
        if reports[0] is not self:
            rank_zero_warn("of several ProfilerReports in a Trainer only the first one profiles; leave the rest out")
            return
        self._step = trainer.global_step
        writes = self._write_files and not is_fast_dev_run(trainer) and "://" not in self._directory
        window = ProfiledWindow(
            trainer,
            self._wait,
            self._warmup,
            self._active,
            operators=self._operators,
            activations=self._activations,
            trace=Path(self._directory) / f"trace_rank{trainer.global_rank}.json.gz" if writes else None,
        )
        self._window = window
        if isinstance(trainer.strategy, MultiGPUStrategy):
            trainer.strategy.record_stages()
            self._gathered = trainer.strategy.gather_at_end(lambda: self._told(window))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        window = self._window
        if window is None:
            return
        window.batches += 1
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            window.step_ends()

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
        if self._window is None:
            return
        self._window.close(trainer)
        if isinstance(trainer.strategy, MultiGPUStrategy):
            self._servers = trainer.strategy.server_statistics()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._window is None:
            return
        told: list[dict[str, Any]]
        told = gather(trainer, self._told(self._window)) if self._gathered is None else self._gathered
        self._window = None
        if not trainer.is_global_zero:
            return
        if not all(of_rank["steps"] for of_rank in told):
            rank_zero_warn(
                f"ProfilerReport profiled no step: training ended within the first {self._first} steps, or each later "
                "step had a validation or the end of an epoch in it; pass a smaller wait or warmup, or train longer"
            )
            return
        name, options = identify(trainer.strategy)
        profile = profile_of_ranks.build(
            told,
            strategy=document.NamedStrategy(name=name, options=options),
            versions=versions_of(trainer.strategy.root_device),
            strategy_options=strategy_options(trainer.strategy),
        )
        self.profile = as_json(profile)
        if self._print_report:
            print(profile_text.text(profile))
        if self._write_files and not is_fast_dev_run(trainer):
            files = {
                profile_page.FILE_NAME: profile_page.page(profile).encode(),
                profile_document.FILE_NAME: document.encoded(self.profile, indent=None),
            }
            written = self.write_files("profile", self._directory, files, prints=self._print_report)
            self.page_path, self.path = [*written, None, None][:2]

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._abandon()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._abandon()

    def results(self) -> dict[str, Any]:
        """The attributes that a spawned rank 0 hands to the process that has started it."""
        return {"profile": self.profile, "path": self.path, "page_path": self.page_path}

    def _abandon(self) -> None:
        if self._window is not None:
            self._window.stop()
            self._window = None

    def _told(self, window: ProfiledWindow) -> dict[str, Any]:
        whole_run = {}
        for key, series in ((key, each) for monitor in self._monitors for key, each in monitor.series.items()):
            if key in profile_sections.RUN_FIGURES and (found := series.statistics()) is not None:
                whole_run[key] = found["median"], found["last"], series.largest
        servers = self._servers and self._servers.section()
        return {**window.told(), "whole_run": whole_run, "servers": servers}
