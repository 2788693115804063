"""Base class of the monitors: values of this rank in, one collective a logging interval, logged figures out."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torchmetrics import MaxMetric, Metric
from typing_extensions import override

from lightning_multigpu._lightning_internals import writes_logs_after_this_batch
from lightning_multigpu.report.statistics import Aggregation, Series, Statistics, aggregate
from lightning_multigpu.strategies.run_view import view_of

Group = Literal["throughput", "communication", "device"]

KEYS: dict[str, Aggregation] = {
    "throughput/samples_per_sec": "sum",
    "throughput/batches_per_sec": "sum",
    "throughput/tokens_per_sec": "sum",
    "throughput/flops_per_sec": "sum",
    "throughput/mfu": "mean",
    "throughput/step_ms": "mean",
    "communication/all_reduce_ms": "mean",
    "communication/total_ms": "mean",
    "communication/exposed_ms": "mean",
    "communication/sent_bytes": "mean",
    "communication/memory_bytes": "mean",
    "communication/algbw_gb_per_sec": "mean",
    "communication/busbw_gb_per_sec": "mean",
    "parameter_server/push_ms": "mean",
    "parameter_server/pull_ms": "mean",
    "parameter_server/staleness_median": "max",
    "parameter_server/staleness_p95": "max",
    "parameter_server/staleness_max": "max",
    "device/utilization_percent": "mean",
    "device/memory_used_bytes": "max",
    "device/power_watts": "sum",
    "device/temperature_celsius": "max",
    "device/process_rss_bytes": "max",
}
"""Key -> how the values of the ranks that have one are aggregated; each callback's docstring explains its keys."""


def keys_of(group: Group) -> list[str]:
    """The keys of one callback, in the table's order."""
    prefixes = ("communication/", "parameter_server/") if group == "communication" else (f"{group}/",)
    return [key for key in KEYS if key.startswith(prefixes)]


class Monitor(Callback):
    """Collects figures on every rank while it trains; subclasses say which.

    An interval ends with every batch after which Lightning writes to its loggers (``Trainer(log_every_n_steps=)``),
    and, when at least one optimizer step was completed since, before a validation and at the end of an epoch. So the
    keys are in ``trainer.callback_metrics`` when ``ModelCheckpoint`` or ``EarlyStopping`` asks for them. The mean of
    the interval is then formed on each rank and aggregated over the ranks: one collective, of one float64 a key and
    rank. All ranks get the same values, in ``trainer.callback_metrics``, ``trainer.logged_metrics`` and every logger.
    Where ranks train without collectives, rank 0 gets the newest means of all ranks, and the others get their own.

    They are logged as the module's own metrics are, by ``self.log``, so that they stand in the row of their step in a
    CSV file; those of an interval that a validation or an epoch ends stand in its row. As with all that ``self.log``
    logs, a figure without a value in an interval keeps its last one until the end of the epoch.

    Args:
        log: whether to log at all; if not, nothing is communicated and :attr:`series` is all there is.
    """

    group: ClassVar[Group]
    warm_up: ClassVar[int] = 1

    def __init__(self, *, log: bool = True) -> None:
        self.series: dict[str, Series] = {}
        self._log = log
        self._interval: dict[str, tuple[float, float]] = {}
        self._interval_start_step = 0

    def statistics(self) -> dict[str, Statistics]:
        """Statistics of this rank over the newest fit, by key in the table's order; keys without a value are absent."""
        by_key = {key: self.series[key].statistics() for key in keys_of(self.group) if key in self.series}
        return {name: statistics for name, statistics in by_key.items() if statistics is not None}

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A fit that has nothing left to train never reaches on_train_start: it must not show the fit before it.
        self.series = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._interval = {}
        self._interval_start_step = trainer.global_step
        self.begin(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.collect(trainer, pl_module, batch)
        if self._log and writes_logs_after_this_batch(trainer):
            self._end_interval(trainer, pl_module, on_step=True)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.pause()
            self._end_interval(trainer, pl_module, on_step=False)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.pause()
        self._end_interval(trainer, pl_module, on_step=False)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.finish()
        self.end()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.end()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.end()

    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training starts on this rank."""

    def collect(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        """A training batch has ended on this rank; must not wait for a device."""

    def pause(self) -> None:
        """Something that is not training begins; training goes on with the next ``on_train_batch_start``."""

    def settle(self) -> None:
        """An interval ends: record what can be known by waiting for the device."""

    def finish(self) -> None:
        """Training has ended in order: record what is still missing."""
        self.settle()

    def end(self) -> None:
        """Training is over, one way or another; may be called more than once."""

    def measures(self, trainer: Trainer) -> bool:
        """Whether there is anything to log under this strategy; the same answer on every rank."""
        return True

    def observe(self, key: str, value: float, weight: float = 1.0) -> None:
        """Records one value of this rank; ``weight`` counts in means (see :meth:`Series.append`)."""
        if key not in self.series:
            self.series[key] = Series(warm_up=self.warm_up)
        self.series[key].append(value, weight)
        if self._log:
            total, total_weight = self._interval.get(key, (0.0, 0.0))
            self._interval[key] = (total + value * weight, total_weight + weight)

    def _end_interval(self, trainer: Trainer, pl_module: LightningModule, *, on_step: bool) -> None:
        if not self._log or trainer.global_step == self._interval_start_step:
            return
        self._interval_start_step = trainer.global_step
        if not self.measures(trainer):
            return
        self.settle()
        local = {key: total / weight for key, (total, weight) in self._interval.items()}
        self._interval = {}
        for key, figure in self._over_ranks(trainer, local).items():
            # In float64, as bytes do not fit float32. An epoch's tensors would bring advice to reduce them over the
            # ranks, which has been done; an epoch's metrics do not.
            logged: torch.Tensor | Metric = torch.tensor(figure, dtype=torch.float64)
            if not on_step:
                metric = MaxMetric(sync_on_compute=False).set_dtype(torch.float64)
                metric.update(logged)
                logged = metric
            pl_module.log(key, logged, on_step=on_step, on_epoch=not on_step, batch_size=1, metric_attribute=key)

    def _over_ranks(self, trainer: Trainer, local: dict[str, float]) -> dict[str, float]:
        """The run's value of each key that any rank has: the same on every rank."""
        keys = keys_of(self.group)
        # Not every rank has every key; a collective has one shape on all ranks, so NaN stands for "none" on the way.
        mine = torch.tensor([local.get(key, math.nan) for key in keys], dtype=torch.float64)
        everyone = mine.unsqueeze(0)
        strategy, told = trainer.strategy, view_of(trainer).newest_of_ranks(self.group, mine.tolist())
        if told is not None:
            everyone = torch.tensor(told, dtype=torch.float64)
        elif trainer.world_size > 1:
            # A sum in which every rank fills a row of its own: the one collective that all strategies have in common.
            device = strategy.root_device
            everyone = torch.zeros(trainer.world_size, len(keys), dtype=torch.float64, device=device)
            everyone[trainer.global_rank] = mine.to(device)
            everyone = strategy.reduce(everyone, group=dist.group.WORLD, reduce_op="sum")
        run: dict[str, float] = {}
        for key, column in zip(keys, everyone.T.tolist(), strict=True):
            values = [value for value in column if not math.isnan(value)]
            if values:
                run[key] = aggregate(values, KEYS[key])
        return run
