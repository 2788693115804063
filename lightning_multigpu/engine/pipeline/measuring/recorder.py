"""Recorder: the timeline of a pipeline's rank while it trains, and the memory that it holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_multigpu.communication.metering.clocks import Clock, HostClock, StreamClock
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.training_memory import SavedActivations, measured_bytes
from lightning_multigpu.planning.pipelines.timeline import Interval, StageMemory, StepTimeline

KEPT_STEPS = 9
_GPU_STRIDE = 16
"""On a GPU one in 16 steps is timed, since the host waits for the device as a timed step begins."""

_Mark = tuple[str, int, int, Any]
"""Kind, stage and micro-batch of the work that begins at this mark, and the clock's mark."""


class Recorder:
    """Records the newest steps of a rank as marks; each mark names the work that begins there::

        receive   forward       idle send  receive    backward     idle
        |---------|-------------|----|-----|----------|------------|

    It records steps whose micro-batches run in one schedule; the first batch of a shape does not. The first of these
    steps, and a later step with more micro-batches, count saved tensors instead of the time.

    Attributes:
        notes_steps: whether anything is recorded.
        counts_activations: whether saved tensors are counted. This takes saved-tensor hooks, which some transforms of
            ``torch.func`` refuse.

    Args:
        meter: gives the time.
        device: where the rank computes.
        parameters: returns the module's parameters; placeholders do not count.
        buffers: returns the buffers that the rank holds.
    """

    def __init__(
        self,
        meter: Meter,
        device: torch.device,
        parameters: Callable[[], list[Parameter]],
        buffers: Callable[[], list[Tensor]] = list,
    ) -> None:
        self.notes_steps = False
        self.counts_activations = False
        self._device = device
        on_gpu = device.type == "cuda"
        self._clock: Clock = StreamClock(meter.now, device) if on_gpu else HostClock(meter.now)
        self._stride = _GPU_STRIDE if on_gpu else 1
        self._parameters = parameters
        self._buffers = buffers
        self._steps: deque[tuple[int, int, tuple[Any, float], list[_Mark]]] = deque(maxlen=KEPT_STEPS)
        self._marks: list[_Mark] | None = None
        self._number = 0
        self._counted = 0
        self._gradients_bytes = 0
        self._activations_bytes: int | None = None

    @contextmanager
    def step(self, num_micro_batches: int, *, together: bool) -> Iterator[None]:
        """Records the step within the block, unless it fails.

        With ``together`` all its micro-batches run in one schedule.
        """
        self._number += 1
        if not (together and self.notes_steps):
            yield
        elif self.counts_activations and num_micro_batches > self._counted:
            held = [tensor for tensor in self._parameters() if not isinstance(tensor, Placeholder)]
            saved = SavedActivations([*held, *self._buffers()])
            with saved.counted():
                yield
            self._counted = num_micro_batches
            self._activations_bytes = saved.peak_bytes
            self._gradients_bytes = measured_bytes(self._parameters(), ()).gradients_bytes
        elif self._number % self._stride == 0:
            origin = self._clock.origin()
            self._marks = marks = []
            try:
                yield
            finally:
                self._marks = None
            marks.append(("end", -1, -1, self._clock.mark()))
            self._steps.append((self._number, num_micro_batches, origin, marks))
        else:
            yield

    def enter(self, kind: str, stage: int, micro_batch: int, *, received: bool = False) -> None:
        """Marks the beginning of a piece of work.

        Args:
            kind: a kind of :class:`~lightning_multigpu.planning.pipelines.timeline.Interval`, or "idle".
            stage: the stage that works.
            micro_batch: the micro-batch of the work.
            received: the work needs a received message, and the rank has waited for it since the previous mark.
        """
        marks = self._marks
        if marks is None:
            return
        if received and marks:
            marks[-1] = ("receive", stage, micro_batch, marks[-1][-1])
        marks.append((kind, stage, micro_batch, self._clock.mark()))

    def steps(self) -> tuple[StepTimeline, ...]:
        """The newest steps that were timed; waits for their events on a GPU."""
        found = []
        for number, count, (origin, origin_s), marks in self._steps:
            self._clock.wait(marks[-1][-1])
            seconds = [origin_s + self._clock.seconds(origin, at) for *_, at in marks]
            timeline = tuple(
                Interval(kind, stage, micro_batch, start_s, end_s)
                for (kind, stage, micro_batch, _), start_s, end_s in zip(marks, seconds, seconds[1:], strict=False)
                if kind != "idle"
            )
            found.append(StepTimeline(number, count, timeline))
        return tuple(found)

    def memory(self, optimizers: Sequence[Optimizer]) -> StageMemory:
        """The memory that the rank holds now, and the memory of saved tensors in the step that counted them."""
        held = measured_bytes(self._parameters(), optimizers)
        return StageMemory(
            parameters_bytes=held.parameters_bytes,
            gradients_bytes=max(self._gradients_bytes, held.gradients_bytes),
            optimizer_bytes=held.optimizer_bytes,
            activations_bytes=self._activations_bytes,
            device_peak_bytes=torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None,
        )
