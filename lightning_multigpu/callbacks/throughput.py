"""Monitor of the samples, tokens and floating-point operations that are trained on per second."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_multigpu.callbacks.monitor import Group, Monitor
from lightning_multigpu.communication.metering.clocks import clock_of
from lightning_multigpu.engine.batch_size import leading_size
from lightning_multigpu.strategies.run_view import view_of

_COMPUTE_DTYPES = {"64": torch.float64, "32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class _Work:
    """The work of a rank in one optimizer step; None where it is not known."""

    batches: int = 0
    samples: int | None = 0
    tokens: int | None = 0
    flops: float | None = 0.0

    def add(self, samples: int | None, tokens: int | None, flops: float | None) -> None:
        self.batches += 1
        for name, amount in (("samples", samples), ("tokens", tokens), ("flops", flops)):
            before = getattr(self, name)
            setattr(self, name, None if amount is None or before is None else before + amount)


class _Lap(NamedTuple):
    """Begin and end of the times between some optimizer steps in which training ran; on a GPU they may come later."""

    spans: list[tuple[Any, Any]]
    steps: int
    work: _Work


class ThroughputMonitor(Monitor):
    """Samples, batches, tokens and floating-point operations per second, and the time per optimizer step.

    The figures are right for batches of any size, with accumulation, and for models that are split over ranks: only
    ranks with a batch of their own count. The time of validation, of checkpoints written at
    its end, and between epochs does not count. On a GPU events time the steps, and the host waits for the device once
    an interval, not once a step.

    Keys, with how the ranks' values become the run's:

    - `throughput/samples_per_sec` (sum): samples of an optimizer step's batches over the step's wall time.
    - `throughput/batches_per_sec` (sum): batches in the same way; a rank's batch counts as one.
    - `throughput/tokens_per_sec` (sum): tokens in the same way; absent if their number is not known.
    - `throughput/flops_per_sec` (sum): floating-point operations that the whole model needs for the samples.
    - `throughput/mfu` (share of 1, mean): model FLOPs utilization, `flops_per_sec` over the peak of all devices that
      work on the rank's batch; absent if either is not known.
    - `throughput/step_ms` (ms, mean): wall time per optimizer step, loading of its batches included, without the time
      from the start of a validation, or the end of an epoch, to the start of the next training batch.

    Args:
        batch_size_fn: returns the samples in a batch; by default the first dimension of the batch's first tensor.
        tokens_fn: returns the tokens in a batch; or the name of a key or attribute of the batch with their number. It
            should not read a tensor on a GPU, which would wait for the device at every batch.
        flops_per_sample: floating-point operations, forward and backward, that the whole model needs for one sample,
            or a function from a batch to those of the batch. By default the module's attribute ``flops_per_batch``,
            if it has one (see ``lightning.fabric.utilities.throughput.measure_flops``).
        peak_flops: FLOP/s of one device at its best; by default what Lightning knows of the device and the precision.
        log: whether to log, or only to collect for a report.

    Raises:
        ValueError: ``flops_per_sample`` or ``peak_flops`` is not above 0; while training, ``tokens_fn`` names what a
            batch does not have.
    """

    group: ClassVar[Group] = "throughput"

    def __init__(
        self,
        *,
        batch_size_fn: Callable[[Any], int] | None = None,
        tokens_fn: Callable[[Any], int] | str | None = None,
        flops_per_sample: float | Callable[[Any], float] | None = None,
        peak_flops: float | None = None,
        log: bool = True,
    ) -> None:
        super().__init__(log=log)
        if isinstance(flops_per_sample, int | float) and not flops_per_sample > 0:
            raise ValueError(f"flops_per_sample={flops_per_sample}: must be above 0; leave it out if it is not known")
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(f"peak_flops={peak_flops}: must be above 0 FLOP/s; leave it out if it is not known")
        self._batch_size_fn = batch_size_fn
        self._tokens_fn = tokens_fn
        self._flops_per_sample = flops_per_sample
        self._peak_flops = peak_flops
        self.steps = 0
        """Optimizer steps of the fit that runs or ran last."""
        self.step_samples: int | None = 0
        """The most samples that this rank has trained on in one of them; None where that is not known."""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self.steps = 0
        self.step_samples = 0

    @override
    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock, self._view = clock_of(trainer.strategy.root_device), view_of(trainer)
        self._started: Any | None = None
        self._spans: list[tuple[Any, Any]] = []
        self._pending: deque[_Lap] = deque()
        self._work = _Work()
        self._last_global_step = trainer.global_step
        self._warned = False
        self._batch_peak_flops = self._peak_flops_per_batch(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._started is None:
            self._started = self._clock.mark()

    @override
    def collect(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        if batch is not None and self._view.owns_batch():
            self._count(pl_module, batch)
        new_steps = trainer.global_step - self._last_global_step
        if new_steps > 0:
            self._last_global_step = trainer.global_step
            self.steps += new_steps
            runs = self._started is not None
            self.pause()
            if runs:
                self._started = self._spans[-1][1]
            self._pending.append(_Lap(self._spans, new_steps, self._work))
            self._spans = []
            known = self.step_samples is not None and self._work.samples is not None
            self.step_samples = max(self.step_samples or 0, self._work.samples or 0) if known else None
            self._work = _Work()
        while self._pending and all(self._clock.passed(end) for _, end in self._pending[0].spans):
            self._resolve(*self._pending.popleft())

    @override
    def pause(self) -> None:
        if self._started is not None:
            self._spans.append((self._started, self._clock.mark()))
            self._started = None

    @override
    def settle(self) -> None:
        while self._pending:
            for _, end in self._pending[0].spans:
                self._clock.wait(end)
            self._resolve(*self._pending.popleft())

    def _count(self, pl_module: LightningModule, batch: Any) -> None:
        samples = self._samples(batch)
        if samples == 0:
            return
        self._work.add(samples, self._tokens(batch), self._flops(pl_module, batch, samples))

    def _samples(self, batch: Any) -> int | None:
        if self._batch_size_fn is not None:
            return int(self._batch_size_fn(batch))
        size = leading_size(batch)
        if size is None and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"samples per second are not measured: no tensor was found in the batch, a {type(batch).__name__}. "
                "Pass ThroughputMonitor(batch_size_fn=...) to say how many samples it holds."
            )
        return size

    def _tokens(self, batch: Any) -> int | None:
        name = self._tokens_fn
        if name is None:
            return None
        if not isinstance(name, str):
            return int(name(batch))
        if isinstance(batch, Mapping) and name in batch:
            return int(batch[name])
        if hasattr(batch, name):
            return int(getattr(batch, name))
        raise ValueError(
            f"tokens_fn={name!r}: the batch, a {type(batch).__name__}, has no such key or attribute; pass a function "
            "from a batch to its number of tokens"
        )

    def _flops(self, pl_module: LightningModule, batch: Any, samples: int | None) -> float | None:
        if callable(self._flops_per_sample):
            return float(self._flops_per_sample(batch))
        if self._flops_per_sample is not None:
            return None if samples is None else self._flops_per_sample * samples
        flops: float | None = getattr(pl_module, "flops_per_batch", None)
        return flops

    def _peak_flops_per_batch(self, trainer: Trainer) -> float | None:
        """FLOP/s of all devices that work on one batch together: under a mesh a rank's batch is not its work alone."""
        peak = self._peak_flops
        # Lightning warns about devices that it does not know: only where the answer would be used.
        if peak is None and (self._flops_per_sample or hasattr(trainer.lightning_module, "flops_per_batch")):
            dtype = _COMPUTE_DTYPES.get(str(trainer.precision).split("-")[0], torch.float32)
            peak = get_available_flops(trainer.strategy.root_device, dtype)
        if peak is None:
            return None
        return peak * trainer.world_size * self._view.devices_per_rank / self._view.data_ranks

    def _resolve(self, spans: list[tuple[Any, Any]], steps: int, work: _Work) -> None:
        seconds = sum(self._clock.seconds(start, end) for start, end in spans)
        if seconds <= 0:
            return
        self.observe("throughput/step_ms", seconds / steps * 1e3, weight=steps)
        if not work.batches:
            return
        amounts = {"samples": work.samples, "batches": work.batches, "tokens": work.tokens, "flops": work.flops}
        for name, amount in amounts.items():
            if amount is not None:
                self.observe(f"throughput/{name}_per_sec", amount / seconds, weight=seconds)
        if work.flops is not None and self._batch_peak_flops is not None:
            self.observe("throughput/mfu", work.flops / seconds / self._batch_peak_flops, weight=seconds)
