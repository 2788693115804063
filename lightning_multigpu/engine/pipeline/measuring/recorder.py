"""Notes what a rank of a pipeline does, and how much it keeps for backward, while it trains."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_multigpu.communication.metering.clocks import recorded_event
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.pipeline.measuring.training_memory import SavedActivations
from lightning_multigpu.engine.pipeline.splitting.placeholder import Placeholder
from lightning_multigpu.planning.timeline import Interval, StageMemory, StepTimeline, Timeline

KEPT_STEPS = 9
_GPU_STRIDE = 16


class Clock(Protocol):
    """Readings are cheap to take, and turned into seconds on the meter's clock later."""

    stride: int
    """One step of so many is timed."""

    def begin(self) -> None:
        """A step that is timed begins."""

    def read(self) -> Any: ...

    def seconds(self, reading: Any) -> float: ...


class HostClock:
    """The meter's clock, for devices that compute while the host waits."""

    stride = 1

    def __init__(self, meter: Meter) -> None:
        self.read: Callable[[], Any] = meter.now

    def begin(self) -> None: ...

    def seconds(self, reading: Any) -> float:
        return float(reading)


class StreamClock:
    """Events on the current CUDA stream, which the host does not wait for.

    The host waits for the device once a step that is timed, as it begins; so it is one step of 16 only.
    """

    stride = _GPU_STRIDE

    def __init__(self, meter: Meter, device: torch.device) -> None:
        self._meter = meter
        self._device = device

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        self._origin = recorded_event()
        self._origin.synchronize()
        self._origin_s = self._meter.now()

    def read(self) -> Any:
        return self._origin, self._origin_s, recorded_event()

    def seconds(self, reading: Any) -> float:
        origin, origin_s, event = reading
        event.synchronize()
        return float(origin_s + origin.elapsed_time(event) / 1e3)


_Mark = tuple[str, int, int, Any]
"""Kind, stage and micro-batch of what the rank does from a reading of the clock on."""


class Recorder:
    """The newest steps of a rank as marks, each of which says what the rank does from then on::

        receive   forward       idle send  receive    backward     idle
        |---------|-------------|----|-----|----------|------------|

    Steps count whose micro-batches all run together, which those of the first batch of a shape do not. In the first of
    them, and in a later one of more micro-batches, what autograd saves is counted instead of the time.

    Attributes:
        notes_steps: whether anything is noted at all.
        counts_activations: whether what autograd saves is counted. That takes saved-tensor hooks, which some transforms
            of ``torch.func`` refuse to work with.

    Args:
        meter: its clock is read.
        device: where the rank computes.
        parameters: those that the rank holds.
        buffers: likewise.
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
        self._clock: Clock = StreamClock(meter, device) if device.type == "cuda" else HostClock(meter)
        self._parameters = parameters
        self._buffers = buffers
        self._steps: deque[tuple[int, int, list[_Mark]]] = deque(maxlen=KEPT_STEPS)
        self._marks: list[_Mark] | None = None
        self._number = 0
        self._counted = 0
        self._gradients_bytes = 0
        self._activations_bytes: int | None = None

    @contextmanager
    def step(self, num_micro_batches: int, *, together: bool) -> Iterator[None]:
        """Within the block a step is run; ``together``: all its micro-batches in one go. One that fails is left out."""
        self._number += 1
        if not (together and self.notes_steps):
            yield
        elif self.counts_activations and num_micro_batches > self._counted:
            kept = SavedActivations([*self._parameters(), *self._buffers()])
            with kept.counted():
                yield
            self._counted = num_micro_batches
            self._activations_bytes = kept.peak_bytes
            self._gradients_bytes = self._held_gradients_bytes()
        elif self._number % self._clock.stride == 0:
            self._clock.begin()
            self._marks = marks = []
            try:
                yield
            finally:
                self._marks = None
            marks.append(("end", -1, -1, self._clock.read()))
            self._steps.append((self._number, num_micro_batches, marks))
        else:
            yield

    def enter(self, kind: str, stage: int, micro_batch: int, *, received: bool = False) -> None:
        """The rank begins with something.

        Args:
            kind: as of :class:`~lightning_multigpu.planning.timeline.Interval`, or "idle".
            stage: whose work it is.
            micro_batch: that it is about.
            received: it needs what was received: since its last mark the rank has waited for that.
        """
        marks = self._marks
        if marks is None:
            return
        if received and marks:
            marks[-1] = ("receive", stage, micro_batch, marks[-1][-1])
        marks.append((kind, stage, micro_batch, self._clock.read()))

    def steps(self) -> tuple[StepTimeline, ...]:
        """The newest steps that were timed; waits for their events on a GPU."""
        return tuple(StepTimeline(number, count, self._timeline(marks)) for number, count, marks in self._steps)

    def memory(self, optimizers: Sequence[Optimizer]) -> StageMemory:
        """What the rank holds now, and what it held in the step in which that was counted."""
        states = [leaf for optimizer in optimizers for leaf in tree_leaves(list(optimizer.state.values()))]
        return StageMemory(
            parameters_bytes=sum(_size_bytes(parameter) for parameter in self._parameters()),
            gradients_bytes=max(self._gradients_bytes, self._held_gradients_bytes()),
            optimizer_bytes=sum(_size_bytes(state) for state in states if isinstance(state, Tensor)),
            activations_bytes=self._activations_bytes,
            device_peak_bytes=torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None,
        )

    def _held_gradients_bytes(self) -> int:
        return sum(_size_bytes(p.grad) for p in self._parameters() if p.grad is not None)

    def _timeline(self, marks: list[_Mark]) -> Timeline:
        seconds = [self._clock.seconds(at) for *_, at in marks]
        return tuple(
            Interval(kind, stage, micro_batch, start_s, end_s)
            for (kind, stage, micro_batch, _), start_s, end_s in zip(marks, seconds, seconds[1:], strict=False)
            if kind != "idle"
        )


def _size_bytes(tensor: Tensor) -> int:
    if isinstance(tensor, Placeholder):
        return 0
    if tensor.is_sparse:
        return _size_bytes(tensor._indices()) + _size_bytes(tensor._values())
    return tensor.numel() * tensor.element_size()
