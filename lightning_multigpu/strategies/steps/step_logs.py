"""Logs of a step's parts, combined and replayed as the logs of one batch: of micro-batches, or of replicas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_multigpu._lightning_internals import logging_as
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.replaced_attributes import replaced

if TYPE_CHECKING:
    import lightning.pytorch as pl

# The positional arguments of LightningModule.log after name and value.
_POSITIONAL = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
_NEUTRAL = {"sum": 0.0, "max": -math.inf, "min": math.inf}


@dataclass(frozen=True)
class Record:
    """One call of ``self.log``.

    Attributes:
        value: a number; for a metric object, its newest batch value.
        metric: the name of the metric object in the module; None for a number.
    """

    name: str
    value: Any
    options: dict[str, Any] = field(default_factory=dict)
    metric: str | None = None


class StepLogs:
    """Records calls of ``module.log`` in a part of a step, and replays them."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module

    @contextmanager
    def recording(self, *, pass_on: bool) -> Iterator[list[Record]]:
        """Within the block ``self.log`` adds to the list; with ``pass_on`` it also logs."""
        records: list[Record] = []
        original = self._module.log

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            records.append(self._record(name, value, args, options))
            if pass_on:
                original(name, value, *args, **options)

        with replaced(self._module, log=log):
            yield records

    def replay(self, records: Sequence[Record], hook: str) -> None:
        """Logs the records as if ``hook`` had called ``self.log``."""
        with logging_as(self._module, hook):
            for record in records:
                value = record.value
                if record.metric is not None:
                    metric = self._module.get_submodule(record.metric)
                    assert isinstance(metric, Metric)
                    metric._forward_cache = record.value
                    value = metric
                self._module.log(record.name, value, **record.options)

    def _record(self, name: str, value: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Record:
        options = {
            **dict(zip(_POSITIONAL, args, strict=False)),
            **options,
        }
        if options.get("sync_dist_group") is not None:
            raise PipelineError(f"self.log({name!r}, sync_dist_group=...): this strategy logs over its data axis only")
        if isinstance(value, Metric):
            path = next((path for path, part in self._module.named_modules() if part is value), None)
            if path is None:
                raise PipelineError(f"self.log({name!r}, ...): the metric must be an attribute of the module")
            return Record(name, value._forward_cache, options, path)
        return Record(name, value.detach().clone() if isinstance(value, Tensor) else value, options)


@dataclass(frozen=True)
class _Entry:
    """A record of one part, its weight in a mean, and the part's loss with its weight."""

    record: Record
    size: float
    loss: Tensor | None
    loss_weight: float

    @property
    def is_loss(self) -> bool:
        value = self.record.value
        if self.loss is None or not isinstance(value, int | float | Tensor):
            return False
        return float(value) == float(self.loss)


def combined(
    parts: Sequence[Sequence[Record]],
    sizes: Sequence[float],
    losses: Sequence[Tensor | None],
    loss_weights: Sequence[float],
) -> list[Record]:
    """The records of a batch from the records of its parts, in the order in which names first appear.

    A value that equals the loss in every part is combined as losses are. Other means are weighted by the records'
    ``batch_size``, else by the size of the part; sums are added, and the largest maximum and smallest minimum taken.

    Args:
        parts: the records of each part, a micro-batch for example.
        sizes: the weight of each part in a mean.
        losses: the loss of each part; None if losses are combined as other means are.
        loss_weights: factors of the losses in the loss of the batch.

    Raises:
        PipelineError: a record has another reduction.
    """
    by_name: dict[str, list[_Entry]] = {}
    for records, size, loss, weight in zip(parts, sizes, losses, loss_weights, strict=True):
        for record in records:
            by_name.setdefault(record.name, []).append(_Entry(record, size, loss, weight))
    return [_combined(entries, len(parts)) for entries in by_name.values()]


def _combined(entries: Sequence[_Entry], num_parts: int) -> Record:
    last = entries[-1].record
    given = [entry.record.options.get("batch_size") for entry in entries]
    sizes = [entry.size if size is None else size for entry, size in zip(entries, given, strict=True)]
    values = [entry.record.value for entry in entries]
    options = dict(last.options)
    if options.get("batch_size") is not None:
        options["batch_size"] = sum(sizes)
    if any(value is None for value in values):
        return replace(last, options=options)
    kind = options.get("reduce_fx", "mean")
    counted = [entry for entry in entries if entry.loss_weight]
    if kind in ("mean", torch.mean) and len(entries) == num_parts and all(entry.is_loss for entry in counted):
        value = sum(entry.record.value * entry.loss_weight for entry in counted)
    elif kind in ("mean", torch.mean):
        value = _mean(values, sizes)
    elif kind in ("sum", torch.sum):
        value = sum(values)
    elif kind in ("max", torch.max, max):
        value = max(values)
    elif kind in ("min", torch.min, min):
        value = min(values)
    else:
        raise PipelineError(
            f"self.log({last.name!r}, reduce_fx={kind!r}) over parts of a batch: pass 'mean', 'sum', 'max' or 'min'"
        )
    return replace(last, value=value, options=options)


def _mean(values: Sequence[Any], sizes: Sequence[float]) -> Any:
    """The weighted mean, without values of size 0: they are means over nothing, NaN."""
    total = sum(sizes)
    if not total or len(values) == 1:
        return sum(values) / len(values)
    return sum(value * size for value, size in zip(values, sizes, strict=True) if size) / total


@contextmanager
def uncounted_logs(module: pl.LightningModule) -> Iterator[None]:
    """Within the block values that the module logs count for nothing: their batch is a repeated one.

    They still take part in the collectives of ``sync_dist=True``, for which other ranks wait.
    """
    original = module.log

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        options = {**dict(zip(_POSITIONAL, args, strict=False)), **options, "batch_size": 0}
        kind = options.get("reduce_fx", "mean")
        neutral = _NEUTRAL.get(getattr(kind, "__name__", kind))
        if neutral is not None and not isinstance(value, Metric):
            value = torch.full_like(torch.as_tensor(value, dtype=torch.get_default_dtype()), neutral)
        original(name, value, **options)

    with replaced(module, log=log):
        yield


@contextmanager
def uncounted_metrics(module: pl.LightningModule) -> Iterator[None]:
    """Within the block updates of the module's metrics count for nothing: their batch is a repeated one."""
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    states = [(metric._copy_state_dict(), metric._update_count) for metric in metrics]
    try:
        yield
    finally:
        for metric, (values, count) in zip(metrics, states, strict=True):
            for name, value in values.items():
                setattr(metric, name, value)
            metric._update_count, metric._computed = count, None
