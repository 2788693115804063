"""The window of steps that a rank profiles.

::

    wait | active: recorded | activations | on GPUs: launches of kernels | reads of values
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import Profiler, PyTorchProfiler
from torch.profiler import profile
from typing_extensions import override

from lightning_multigpu.callbacks.profile.profiled_steps import (
    ProfiledStep,
    Span,
    TimedTransfer,
    figures_of,
    medians,
    partition,
    phase_of,
)
from lightning_multigpu.callbacks.profile.traced_steps import launches_of, reads_of, traced
from lightning_multigpu.communication.metering.clocks import synchronise
from lightning_multigpu.communication.metering.records import Transfer
from lightning_multigpu.engine.training_memory import SavedActivations
from lightning_multigpu.planning.pipelines.timeline import StageRecord
from lightning_multigpu.report.rank_figures import LaunchQueue, RankFigures, ReadValues
from lightning_multigpu.strategies.run_view import view_of

_FEWEST = 5
"""Steps that are counted however long they take."""
_CALLBACKS = 8
"""The number of callbacks to list, those that take the most time."""
_PASSES = {"forward": "forward", "backward": "backward", "weight": "backward"}


class ActionRecorder(Profiler):
    """Records the actions that Lightning reports as spans, and passes them on to the profiler whose place it takes."""

    def __init__(self, inner: Profiler, clock: Callable[[], float]) -> None:
        super().__init__()
        self.inner = inner
        self.spans: list[Span] = []
        """Actions that have ended, in the order of their ends."""
        self._clock = clock
        self._open: list[tuple[str, float]] = []

    @override
    def start(self, action_name: str) -> None:
        self.inner.start(action_name)
        self._open.append((action_name, self._clock()))

    @override
    def stop(self, action_name: str) -> None:
        now_s = self._clock()
        for index in reversed(range(len(self._open))):
            if self._open[index][0] == action_name:
                self.spans.append(Span(self._open.pop(index)[1], now_s, action_name))
                break
        self.inner.stop(action_name)


class ProfiledWindow:
    """The profiled steps of this rank; arguments are as those of :class:`.ProfilerReport`.

    Attributes:
        is_over: whether all that was asked for has been measured.
        activations_bytes: the most that autograd kept for backward; None if it was not counted.
        batches: of the step that runs, which its callback counts.
        stages: the newest record of a pipeline's stages.
        interrupted: whether a validation or the end of an epoch was in it.
    """

    def __init__(
        self,
        trainer: Trainer,
        wait: int,
        active: int | timedelta,
        *,
        trace: bool | None,
        activations: bool,
        waits_for_device: bool,
    ) -> None:
        self._view = view_of(trainer)
        self._meter = self._view.meter
        self.now: Callable[[], float] = time.perf_counter if self._meter is None else self._meter.now
        self._device = trainer.strategy.root_device if waits_for_device else torch.device("cpu")
        self._rank = trainer.global_rank
        self._node = trainer.node_rank
        workers = getattr(trainer.train_dataloader, "num_workers", None)
        self._workers = workers if isinstance(workers, int) else None
        self._recorder: ActionRecorder | None = None
        self._transfers: list[Transfer] = []
        self._exposed: list[tuple[float, float]] = []
        self._end_s = math.inf
        self._counted: list[tuple[float, float, int]] = []
        self._activations = activations
        self._on_gpu = trainer.strategy.root_device.type == "cuda"
        # A second torch.profiler would empty the first.
        beside = isinstance(_profiler(trainer), PyTorchProfiler)
        self._traces = (self._on_gpu if trace is None else trace) and not beside
        self._reads: list[ReadValues] = []
        self._launches: LaunchQueue | None = None
        self.is_over = False
        self.stages: StageRecord | None = None
        self.activations_bytes: int | None = None
        self.batches = 0
        self.interrupted = False
        self._course = self._steps(trainer, wait, active)
        next(self._course)

    def step_ends(self) -> None:
        next(self._course, None)
        self.batches = 0
        self.interrupted = False

    def close(self) -> None:
        """Training has ended, maybe within the window."""
        if self._meter is not None:
            self._meter.flush()
        self.stop()
        if self.stages is None and self._counted:
            self.stages = self._view.stage_record()

    def stop(self) -> None:
        """Puts back what the window has replaced."""
        self._course.close()
        if self._meter is not None and self._meter.listener == self._heard:
            self._meter.listener = None

    def _steps(self, trainer: Trainer, wait: int, active: int | timedelta) -> Generator[None]:
        """What is measured in which step; each ``yield`` returns at the end of an optimizer step."""
        for _ in range(wait):
            yield
        with self._recorded(trainer):
            start_s = self.now()
            while not self._is_enough(active):
                yield
                begin_s, start_s = start_s, self.now()
                if not self.interrupted:
                    self._counted.append((begin_s, start_s, self.batches))
        self.stages = self._view.stage_record()
        if self._activations:
            module = trainer.lightning_module
            saved = SavedActivations([*module.parameters(), *module.buffers()])
            with saved.counted():
                yield
            self.activations_bytes = saved.peak_bytes
        if self._traces:
            if self._on_gpu:
                with traced(self._count_launches, with_stack=False):
                    yield
            # Stacks make the host slower, so that it would not be ahead of its GPU.
            with traced(lambda recorded: self._reads.extend(reads_of(recorded)), with_stack=True):
                yield
        self.is_over = True

    def _is_enough(self, active: int | timedelta) -> bool:
        if isinstance(active, int):
            return len(self._counted) >= active
        seconds = active.total_seconds()
        return len(self._counted) >= _FEWEST and self._counted[-1][1] - self._counted[0][0] >= seconds

    def _count_launches(self, recorded: profile) -> None:
        self._launches = launches_of(recorded)

    def figures(self, parameters_bytes: int) -> RankFigures:
        """The figures of this rank, which holds ``parameters_bytes`` of parameters."""
        spans = [] if self._recorder is None else self._recorder.spans
        steps = [self._step(spans, *counted) for counted in self._counted]
        return RankFigures(
            rank=self._rank,
            host=socket.gethostname(),
            node=self._node,
            callbacks_s=medians([_callbacks_s(spans, start_s, end_s) for start_s, end_s, _ in self._counted]),
            is_metered=self._meter is not None,
            data_workers=self._workers,
            parameters_bytes=parameters_bytes,
            launches=self._launches,
            reads=self._reads,
            **(figures_of(steps) if steps else {"steps": 0, "phases_s": {}}),
        )

    def _step(self, spans: Sequence[Span], start_s: float, end_s: float, batches: int) -> ProfiledStep:
        within = [span for span in spans if span.start_s < end_s and span.end_s > start_s]
        transfers = [
            TimedTransfer(
                *(t.operation, t.group, t.group_size, *t.interval()), t.size_bytes, t.sent_bytes, t.memory_bytes
            )
            for t in self._transfers
        ]
        return ProfiledStep(
            batches=batches,
            parts=self._parts(within, start_s, end_s),
            transfers=[transfer for transfer in transfers if start_s <= transfer.start_s < end_s],
        )

    def _parts(self, spans: Sequence[Span], start_s: float, end_s: float) -> list[Span]:
        phases = [Span(s.start_s, s.end_s, phase_of(s.name)) for s in spans]
        exposed = [Span(a, b, "communication") for a, b in self._exposed if a < end_s and b > start_s]
        passes: list[Span] = []
        for step in () if self.stages is None else self.stages.steps:
            if step.timeline and step.timeline[0].start_s >= start_s and step.timeline[-1].end_s <= end_s:
                passes.append(Span(step.timeline[0].start_s, step.timeline[-1].end_s, "stage_wait"))
                passes += [Span(i.start_s, i.end_s, _PASSES.get(i.kind, "stage_wait")) for i in step.timeline]
        return partition(phases, [exposed, passes], start_s, end_s)

    @contextmanager
    def _recorded(self, trainer: Trainer) -> Iterator[None]:
        """Records actions and transfers. The listener stays: what has begun in the window may end later."""
        self._recorder = recorder = ActionRecorder(_profiler(trainer), self._now_of_device)
        trainer.profiler = recorder  # type: ignore[attr-defined]
        if self._meter is not None:
            self._meter.listener = self._heard
        try:
            yield
        finally:
            self._end_s = self.now()
            if _profiler(trainer) is recorder:
                trainer.profiler = recorder.inner  # type: ignore[attr-defined]

    def _now_of_device(self) -> float:
        synchronise(self._device)
        return self.now()

    def _heard(self, transfers: list[Transfer], exposed: list[tuple[float, float]]) -> None:
        self._transfers += [transfer for transfer in transfers if transfer.interval()[0] < self._end_s]
        self._exposed += [interval for interval in exposed if interval[0] < self._end_s]


def _profiler(trainer: Trainer) -> Profiler:
    # Lightning attaches it when the Trainer is made, without an annotation.
    profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
    return profiler


def _callbacks_s(spans: Sequence[Span], start_s: float, end_s: float) -> dict[str, float]:
    """Seconds of a step by callback and by hook of the module, without what is no training."""
    totals: dict[str, float] = {}
    for span in spans:
        if span.start_s >= end_s or span.end_s <= start_s or phase_of(span.name) != "callbacks":
            continue
        if span.name.startswith(("[Callback]", "[LightningModule]")):
            owner, _, hook = span.name.partition("]")[2].rpartition(".")
            name = f"{owner.partition('{')[0]}.{hook}"
            totals[name] = totals.get(name, 0.0) + min(span.end_s, end_s) - max(span.start_s, start_s)
    return dict(sorted(totals.items(), key=lambda item: -item[1])[:_CALLBACKS])
