"""Monitor of the samples, tokens and floating-point operations that are trained on per second."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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


class _Lap(NamedTuple):
    """Begin and end of the times between some optimizer steps in which training ran; on a GPU they may come later."""

    spans: list[tuple[Any, Any]]
    steps: int
    work: dict[str, float | None]


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
        tokens_fn: returns the tokens in a batch. It should not read a tensor on a GPU, which would wait for the device
            at every batch.
        flops_per_sample: floating-point operations, forward and backward, that the whole model needs for one sample. By
            default the module's attribute ``flops_per_batch``, if it has one (see
            ``lightning.fabric.utilities.throughput.measure_flops``), counts those of a batch.
        peak_flops: FLOP/s of one device at its best; by default what Lightning knows of the device and the precision.
        log: whether to log, or only to collect for a report.

    Raises:
        ValueError: ``flops_per_sample`` or ``peak_flops`` is not above 0.
    """

    group: ClassVar[Group] = "throughput"

    def __init__(
        self,
        *,
        batch_size_fn: Callable[[Any], int] | None = None,
        tokens_fn: Callable[[Any], int] | None = None,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
        log: bool = True,
    ) -> None:
        super().__init__(log=log)
        if flops_per_sample is not None and not flops_per_sample > 0:
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
        self._work: dict[str, float | None] = {}
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
            samples = self._work.get("samples", 0)
            known = self.step_samples is not None and samples is not None
            self.step_samples = int(max(self.step_samples or 0, samples or 0)) if known else None
            self._work = {}
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
        """Adds a batch to the work of the step; what is not known of one is not known of the step."""
        if (samples := self._samples(batch)) == 0:
            return
        tokens = None if self._tokens_fn is None else int(self._tokens_fn(batch))
        amounts = {"samples": samples, "batches": 1, "tokens": tokens, "flops": self._flops(pl_module, samples)}
        for name, amount in amounts.items():
            before = self._work.get(name, 0)
            self._work[name] = None if amount is None or before is None else before + amount

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

    def _flops(self, pl_module: LightningModule, samples: int | None) -> float | None:
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

    def _resolve(self, spans: list[tuple[Any, Any]], steps: int, work: dict[str, float | None]) -> None:
        seconds = sum(self._clock.seconds(start, end) for start, end in spans)
        if seconds <= 0:
            return
        self.observe("throughput/step_ms", seconds / steps * 1e3, weight=steps)
        for name, amount in work.items():
            if amount is not None:
                self.observe(f"throughput/{name}_per_sec", amount / seconds, weight=seconds)
        if (flops := work.get("flops")) is not None and self._batch_peak_flops is not None:
            self.observe("throughput/mfu", flops / seconds / self._batch_peak_flops, weight=seconds)
