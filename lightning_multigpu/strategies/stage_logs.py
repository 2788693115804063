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


def combined(parts: Sequence[Sequence[Record]], samples: Sequence[int]) -> list[Record]:
    """The records of a batch from those of its micro-batches, in the order in which names first appear.

    Means are weighted by the records' ``batch_size``, else by the samples of their micro-batch; sums are added, maxima
    and minima taken.

    Args:
        parts: the records of each micro-batch.
        samples: of each micro-batch.

    Raises:
        PipelineError: a record is reduced by something else.
    """
    by_name: dict[str, list[tuple[Record, int]]] = {}
    for records, size in zip(parts, samples, strict=True):
        for record in records:
            by_name.setdefault(record.name, []).append((record, size))
    return [_combine(name, entries) for name, entries in by_name.items()]


def _combine(name: str, entries: Sequence[tuple[Record, int]]) -> Record:
    last, _ = entries[-1]
    sizes = [record.options.get("batch_size") or size for record, size in entries]
    values = [record.value for record, _ in entries]
    kind = last.options.get("reduce_fx", "mean")
    kind = kind if isinstance(kind, str) else _REDUCTIONS.get(kind, kind)
    options = dict(last.options)
    if options.get("batch_size") is not None:
        options["batch_size"] = sum(sizes)
    if any(value is None for value in values):
        return replace(last, options=options)
    return replace(last, value=_reduced(name, kind, values, sizes), options=options)


def _reduced(name: str, kind: Any, values: Sequence[Any], sizes: Sequence[int]) -> Any:
    reductions: dict[str, Callable[[], Any]] = {
        "mean": lambda: sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes),
        "sum": lambda: sum(values),
        "max": lambda: max(values),
        "min": lambda: min(values),
    }
    if kind not in reductions:
        raise PipelineError(
            f"self.log({name!r}, reduce_fx={kind!r}) over micro-batches: pass 'mean', 'sum', 'max' or 'min'"
        )
    return values[0] if len(values) == 1 else reductions[kind]()
