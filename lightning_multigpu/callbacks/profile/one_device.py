"""Comparison of a run with one device, on which a copy of the model trains for a few steps.

::

    rank 0    first batch | copies the model, trains 1 + 5 steps | step | step | ...
    others    first batch |               waits                  | step | step | ...
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn import SyncBatchNorm
from torchmetrics import Metric

from lightning_multigpu.callbacks.probes import usable_cores
from lightning_multigpu.callbacks.stopwatch import Lap, Stopwatch
from lightning_multigpu.communication.metering.clocks import clock_of, timed
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.optimizer_state import held_states
from lightning_multigpu.report.document import OneDeviceSection
from lightning_multigpu.report.statistics import Series, quantile
from lightning_multigpu.strategies.base import MultiGPUStrategy
from lightning_multigpu.strategies.steps.dry_run import unlogged_loss, without_trace

NUM_STEPS = 5
LIMIT_S = 10.0
"""After this time, and one timed step, no further step begins: the other ranks wait meanwhile."""


@dataclass(frozen=True)
class Alone:
    """The time of one device.

    Attributes:
        step_s: of an optimizer step on the batches of one data rank, without loading.
        threads: intra-op threads on a CPU; None on a GPU.
    """

    step_s: float
    threads: int | None


class OneDevice:
    """The comparison of one fit. All methods but :meth:`comparison` are called on every rank.

    The copy trains on the first batch of rank 0 and is thrown away; the run does not change. On a CPU the copy has the
    intra-op threads of all ranks of the host together, at most one for each core: as many as one process would use.

    Args:
        trainer: of the fit.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._alone: Alone | str | None = None
        self._stopwatch = Stopwatch(clock_of(trainer.strategy.root_device))
        self._laps: deque[Lap] = deque()
        self._steps = Series(warm_up=1)
        self._global_step = trainer.global_step

    @property
    def is_due(self) -> bool:
        """Whether the copy has not trained yet."""
        return self._alone is None

    def measure(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        """Trains the copy on rank 0, while the other ranks wait. A collective."""
        meter = getattr(trainer.strategy, "meter", None)
        with meter.unrecorded() if isinstance(meter, Meter) else contextlib.nullcontext():
            self._alone = _objection(trainer, module)
            if self._alone is None:
                strategy = trainer.strategy
                values = strategy.values_of_other_ranks() if isinstance(strategy, MultiGPUStrategy) else {}
                found = _train_alone(trainer, module, batch, values) if trainer.is_global_zero else None
                self._alone = strategy.broadcast(found)

    def leave_out(self, reason: str) -> None:
        """Trains no copy; the section has the reason."""
        self._alone = reason

    def batch_starts(self) -> None:
        """A training batch has been loaded."""
        self._stopwatch.start()

    def batch_ends(self, trainer: Trainer) -> None:
        """A training batch has ended."""
        self._stopwatch.pause()
        if trainer.global_step > self._global_step:
            self._global_step = trainer.global_step
            self._laps.append(self._stopwatch.lap())
        while self._laps and self._laps[0].ready():
            self._steps.append(max(self._laps.popleft().seconds, 1e-9))

    def median_step_s(self) -> float | None:
        """The median step of this rank, without loading; None without a step. Waits for the device."""
        while self._laps:
            self._laps[0].wait()
            self._steps.append(max(self._laps.popleft().seconds, 1e-9))
        statistics = self._steps.statistics()
        return None if statistics is None else statistics["median"]

    def comparison(self, medians_s: list[float | None], num_batches: int) -> OneDeviceSection:
        """The section of a run's document.

        Args:
            medians_s: of all ranks, from :meth:`median_step_s`.
            num_batches: different batches that the ranks train on at once.
        """
        steps_s = [median for median in medians_s if median is not None]
        if self._alone is None or not steps_s:
            return OneDeviceSection(reason="no step was trained")
        if isinstance(self._alone, str):
            return OneDeviceSection(reason=self._alone)
        return OneDeviceSection(
            ratio=num_batches * self._alone.step_s / max(steps_s),
            step_ms=1e3 * self._alone.step_s,
            run_step_ms=1e3 * max(steps_s),
            threads=self._alone.threads,
        )


def _objection(trainer: Trainer, module: LightningModule) -> str | None:
    """The reason why a copy cannot train alone, the same on all ranks; None if it can."""
    strategy = trainer.strategy
    if trainer.world_size == 1:
        return "the run has one rank"
    if not isinstance(strategy, MultiGPUStrategy | DDPStrategy):
        return f"under {type(strategy).__name__} a rank may hold a part of the model only"
    if not module.automatic_optimization:
        return "the module optimizes by itself (automatic_optimization = False)"
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        return "training_step takes its batches from dataloader_iter"
    if any(isinstance(part, SyncBatchNorm) for part in module.modules()):
        return "its SyncBatchNorm layers wait for all ranks"
    return None


def _train_alone(trainer: Trainer, module: LightningModule, batch: Any, values: Mapping[int, Tensor]) -> Alone | str:
    device = trainer.strategy.root_device
    threads = None
    if device.type == "cpu":
        # Lightning's strategies and ours all have num_processes, their base has not.
        ranks_of_host: int = trainer.strategy.num_processes  # type: ignore[attr-defined]
        threads = min(usable_cores(), ranks_of_host * torch.get_num_threads())
    try:
        with without_trace(module), _intra_op_threads(threads):
            return Alone(_step_s(trainer, module, batch, values, device), threads)
    except (torch.OutOfMemoryError, MemoryError):
        return "the model does not fit on one device beside this rank's part"
    except Exception as error:  # whatever it is, the run itself may well train
        text = next(iter(str(error).splitlines()), "")
        return f"a copy of the model does not train on one device: {type(error).__name__}: {text}"
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)  # reports of memory are about the run


def _step_s(
    trainer: Trainer, module: LightningModule, batch: Any, values: Mapping[int, Tensor], device: torch.device
) -> float:
    # What deepcopy puts in the place of each object, by its id: metrics may refer to the strategy.
    copies: dict[int, Any] = {**values, id(trainer.strategy): trainer.strategy, id(trainer): trainer}
    alone = copy.deepcopy(module, copies).to(device)
    copies |= {id(each.state): copy.deepcopy(held_states(each), copies) for each in trainer.optimizers}
    optimizers = [copy.deepcopy(optimizer, copies) for optimizer in trainer.optimizers]
    alone.trainer = trainer
    object.__setattr__(alone, "all_gather", lambda data, *args, **options: data)
    for part in alone.modules():
        if isinstance(part, Metric):
            part.distributed_available_fn = lambda: False
    num_batches = trainer.accumulate_grad_batches

    def train_batch(inputs: Any) -> None:
        step = inspect.signature(alone.training_step)
        arguments = (inputs, 0) if _takes_two(step) else (inputs,)
        loss = unlogged_loss(trainer.precision_plugin, alone, lambda: alone.training_step(*arguments))
        if loss is None:
            raise ValueError("training_step returned no loss")
        (loss / num_batches).backward()

    def optimize() -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    seconds: list[tuple[float, float]] = []
    start_s = time.perf_counter()
    for _ in range(1 + NUM_STEPS):  # the first allocates memory
        inputs = copy.deepcopy(batch)
        seconds.append((timed(lambda inputs=inputs: train_batch(inputs), device), timed(optimize, device)))  # type: ignore[misc]
        if len(seconds) > 1 and time.perf_counter() - start_s > LIMIT_S:
            break
    of_batches, of_optimizers = (quantile(sorted(column), 0.5) for column in zip(*seconds[1:], strict=True))
    return num_batches * of_batches + of_optimizers


def _takes_two(step: inspect.Signature) -> bool:
    kinds = [parameter.kind for parameter in step.parameters.values()]
    return len(kinds) > 1 or inspect.Parameter.VAR_POSITIONAL in kinds


@contextlib.contextmanager
def _intra_op_threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
