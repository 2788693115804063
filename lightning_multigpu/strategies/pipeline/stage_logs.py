"""What a step logs on the last stage, brought to all stages: once for a batch, whatever the number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_multigpu._lightning_internals import logging_as
from lightning_multigpu.engine.pipeline.errors import PipelineError

if TYPE_CHECKING:
    import lightning.pytorch as pl

_REDUCTIONS: dict[Any, str] = {
    torch.mean: "mean",
    torch.sum: "sum",
    torch.max: "max",
    torch.min: "min",
    max: "max",
    min: "min",
}


@dataclass(frozen=True)
class Record:
    """One call of ``self.log``.

    ``value`` is a number or, for a metric object, its latest batch value; ``metric`` is then the metric's name in the
    module.
    """

    name: str
    value: Any
    options: dict[str, Any] = field(default_factory=dict)
    metric: str | None = None


class StageLogs:
    """Stands in for ``module.log`` while a stage runs its part of a step.

    Args:
        module: the user's module.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._records: list[Record] = []

    @contextmanager
    def recording(self, *, pass_on: bool) -> Iterator[list[Record]]:
        """Within the block ``self.log`` is recorded in the list; with ``pass_on`` it also does what it always does."""
        records: list[Record] = []
        original = self._module.log

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            records.append(self._record(name, value, args, options))
            if pass_on:
                original(name, value, *args, **options)

        object.__setattr__(self._module, "log", log)
        try:
            yield records
        finally:
            object.__delattr__(self._module, "log")

    def replay(self, records: Sequence[Record], hook: str) -> None:
        """Logs the records, on this stage, as if ``hook`` had called ``self.log``."""
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
        # Positional arguments of LightningModule.log behind name and value, in their order.
        options = {
            **dict(zip(("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx"), args, strict=False)),
            **options,
        }
        if options.get("sync_dist_group") is not None:
            raise PipelineError(f"self.log({name!r}, sync_dist_group=...): a pipeline logs over the data axis only")
        if isinstance(value, Metric):
            path = next((path for path, part in self._module.named_modules() if part is value), None)
            if path is None:
                raise PipelineError(f"self.log({name!r}, ...): the metric must be an attribute of the module")
            return Record(name, value._forward_cache, options, path)
        return Record(name, value.detach().clone() if isinstance(value, Tensor) else value, options)


@dataclass(frozen=True)
class _Entry:
    """A record of one micro-batch, what it counts for in a mean, and that micro-batch's loss and its weight."""

    record: Record
    size: float
    loss: Tensor
    loss_weight: float

    @property
    def is_loss(self) -> bool:
        value = self.record.value
        return isinstance(value, int | float | Tensor) and float(value) == float(self.loss)


def combined(
    parts: Sequence[Sequence[Record]], sizes: Sequence[float], losses: Sequence[Tensor], loss_weights: Sequence[float]
) -> list[Record]:
    """The records of a batch from those of its micro-batches, in the order in which names first appear.

    What is the loss in every micro-batch is added up as losses are. Other means are weighted by the records'
    ``batch_size``, else by the micro-batch's size; sums are added, maxima and minima taken.

    Args:
        parts: the records of each micro-batch.
        sizes: what each micro-batch counts for in a mean.
        losses: of each micro-batch.
        loss_weights: what these are multiplied by to add up to the loss of the batch.

    Raises:
        PipelineError: a record is reduced by something else.
    """
    by_name: dict[str, list[_Entry]] = {}
    for records, size, loss, weight in zip(parts, sizes, losses, loss_weights, strict=True):
        for record in records:
            by_name.setdefault(record.name, []).append(_Entry(record, size, loss, weight))
    return [_combine(name, entries, len(parts)) for name, entries in by_name.items()]


def _combine(name: str, entries: Sequence[_Entry], num_parts: int) -> Record:
    last = entries[-1].record
    given = [entry.record.options.get("batch_size") for entry in entries]
    sizes = [entry.size if size is None else size for entry, size in zip(entries, given, strict=True)]
    values = [entry.record.value for entry in entries]
    kind = last.options.get("reduce_fx", "mean")
    kind = kind if isinstance(kind, str) else _REDUCTIONS.get(kind, kind)
    options = dict(last.options)
    if options.get("batch_size") is not None:
        options["batch_size"] = sum(sizes)
    if any(value is None for value in values):
        return replace(last, options=options)
    counted = [entry for entry in entries if entry.loss_weight]
    if kind == "mean" and len(entries) == num_parts and all(entry.is_loss for entry in counted):
        value = sum(entry.record.value * entry.loss_weight for entry in counted)
    else:
        value = _reduced(name, kind, values, sizes)
    return replace(last, value=value, options=options)


def _mean(values: Sequence[Any], sizes: Sequence[float]) -> Any:
    """Values of size 0 are left out: means over nothing, which are NaN."""
    total = sum(sizes)
    if not total:
        return sum(values) / len(values)
    return sum(value * size for value, size in zip(values, sizes, strict=True) if size) / total


def _reduced(name: str, kind: Any, values: Sequence[Any], sizes: Sequence[float]) -> Any:
    reductions: dict[str, Callable[[], Any]] = {
        "mean": lambda: _mean(values, sizes),
        "sum": lambda: sum(values),
        "max": lambda: max(values),
        "min": lambda: min(values),
    }
    if kind not in reductions:
        raise PipelineError(
            f"self.log({name!r}, reduce_fx={kind!r}) over micro-batches: pass 'mean', 'sum', 'max' or 'min'"
        )
    return values[0] if len(values) == 1 else reductions[kind]()
