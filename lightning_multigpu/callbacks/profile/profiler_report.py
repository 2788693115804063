"""The profile of a window of steps: where the time goes on every rank, and what would make the steps shorter."""

from __future__ import annotations

import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler, PyTorchProfiler
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_multigpu.callbacks.device_utilization import DeviceUtilizationMonitor
from lightning_multigpu.callbacks.probes import host_memory, usable_cores
from lightning_multigpu.callbacks.profile.action_recorder import ActionRecorder
from lightning_multigpu.callbacks.profile.operator_trace import OperatorTrace
from lightning_multigpu.callbacks.profile.value_reads import ValueReads
from lightning_multigpu.callbacks.run_report import gather, is_fast_dev_run, memory_of, versions_of
from lightning_multigpu.callbacks.silent_monitors import SilentMonitors
from lightning_multigpu.callbacks.strategy_identity import identify, strategy_options
from lightning_multigpu.callbacks.throughput import ThroughputMonitor
from lightning_multigpu.communication.clock_offsets import ClockOffset, clock_offsets
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.metering.records import Transfer
from lightning_multigpu.engine.parameter_server.server_statistics import ServerStatistics
from lightning_multigpu.engine.training_memory import SavedActivations, measured_bytes
from lightning_multigpu.planning.pipelines.timeline import StageRecord
from lightning_multigpu.planning.step_phases import Span, partition, phase_of
from lightning_multigpu.report import document
from lightning_multigpu.report.profile import profile_document, profile_page, profile_text, run_curves
from lightning_multigpu.strategies.base import MultiGPUStrategy

_TRIAL_STEPS = 3
_CALLBACKS = 8
"""The number of callbacks to list, those that take the most time."""
_PASSES = {"forward": "forward", "backward": "backward", "weight": "backward"}


class ProfilerReport(SilentMonitors):
    """Profiles a window of optimizer steps on all ranks, and says which parts of a step take its time.

    At the end of training rank 0 prints the phases of a step for each rank (see
    :mod:`lightning_multigpu.planning.step_phases`), and the diagnosis: each reason for long steps with its evidence,
    its remedy, and the predicted step time with that remedy, the largest saving first. A saving below 5 % of a step is
    not shown. The same is written to ``report.html``, a page with pictures, to ``profile.json`` (see
    :mod:`lightning_multigpu.report.profile.profile_document`), and as a timeline of all ranks to
    ``profile_trace.json``, for https://ui.perfetto.dev or ``chrome://tracing``; all in ``trainer.log_dir``, else
    ``trainer.default_root_dir``.

    The window is counted in optimizer steps: first ``wait`` steps, then ``warmup`` steps that are recorded but not
    counted, then ``active`` steps that are counted. Steps with a validation or the end of an epoch in them are
    replaced by later ones. In one further step, reads of tensors' values are counted; with ``activations``, the
    activations that autograd keeps for backward are counted in another one; with ``operators``, and on GPUs, torch's
    profiler records the operators of another one. If the ranks of a host have more threads than cores, three more
    steps run with fewer threads, which changes results by rounding alone. Throughput, utilization and memory in use
    are those of the whole run, from the Trainer's :class:`ThroughputMonitor` and :class:`DeviceUtilizationMonitor`, or
    from silent ones.

    With ``Trainer(profiler="pytorch")`` the operators are those of the training steps that this profiler records, and
    none are recorded beside it. Its steps take longer: keep its schedule apart from the window.

    The figures come from the actions that Lightning reports to its profiler, which still receives them, from the
    strategy's meter and the record of a pipeline's stages. Clocks of ranks are compared within the window. Under
    ``async_ps`` ranks of other hosts keep their own clock. On GPUs the phases are those of the host, which runs ahead
    of the device.

    Args:
        wait: optimizer steps before the window; the first ones pay for allocations and for what is compiled.
        warmup: steps at its beginning that are not counted.
        active: steps that are counted.
        operators: whether one step is recorded by torch's profiler, whose first start takes seconds. None: on GPUs,
            where it tells whether the host runs ahead of its GPU.
        activations: whether the activations that autograd keeps for backward are counted in one step. Saved-tensor
            hooks count them: ``torch.func.grad`` and related functions raise an error under such hooks, and compiled
            layers may be compiled once more.
        link_gbit: speed of the link between hosts in Gbit/s (10^9 bits), if it is known: transfers are then also shown
            as shares of that speed.
        print_report: whether rank 0 prints the report.
        write_files: whether rank 0 writes the files.

    Raises:
        ValueError: ``wait`` or ``warmup`` is below 0, ``active`` below 1, or ``link_gbit`` not above 0.
    """

    def __init__(
        self,
        *,
        wait: int = 5,
        warmup: int = 1,
        active: int = 10,
        operators: bool | None = None,
        activations: bool = False,
        link_gbit: float | None = None,
        print_report: bool = True,
        write_files: bool = True,
    ) -> None:
        super().__init__()
        if link_gbit is not None and not link_gbit > 0:
            raise ValueError(f"link_gbit={link_gbit}: must be above 0 Gbit/s")
        for name, value, least in (("wait", wait, 0), ("warmup", warmup, 0), ("active", active, 1)):
            if value < least:
                raise ValueError(f"{name}={value}: must be at least {least} optimizer steps")
        self.profile: dict[str, Any] | None = None
        """The newest profile, as a dictionary, on rank 0."""
        self.path: Path | None = None
        """The path of ``profile.json``, on rank 0."""
        self.page_path: Path | None = None
        """The path of ``report.html``, on rank 0."""
        self._wait, self._warmup, self._active = wait, warmup, active
        self._first = wait + warmup
        self._operators, self._activations = operators, activations
        self._link_gbit = link_gbit
        self._print_report = print_report
        self._write_files = write_files
        self._window: _Window | None = None
        self._gathered: list[Any] | None = None
        self._servers: ServerStatistics | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._monitors = (self.monitor(trainer, ThroughputMonitor), self.monitor(trainer, DeviceUtilizationMonitor))
        self._servers, self._gathered = None, None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        window = _Window(
            trainer, self._wait, self._warmup, self._active, operators=self._operators, activations=self._activations
        )
        self._window = window
        if isinstance(trainer.strategy, MultiGPUStrategy):
            trainer.strategy.record_stages(count_activations=self._activations or None)  # else as a RunReport wants it
            self._gathered = trainer.strategy.gather_at_end(lambda: self._told(window))
        super().on_train_start(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        window = self._window
        if window is None:
            return
        window.batches += 1
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            window.step_ends(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        if self._window is not None:
            self._window.interrupted = True

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if self._window is not None:
            self._window.interrupted = True

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        assert self._window is not None
        self._window.close(trainer)
        if isinstance(trainer.strategy, MultiGPUStrategy):
            self._servers = trainer.strategy.server_statistics()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._window is None:
            return
        told: list[dict[str, Any]]
        told = gather(trainer, self._told(self._window)) if self._gathered is None else self._gathered
        directory = trainer.log_dir or trainer.default_root_dir  # a broadcast: every rank must ask
        self._window = None
        if not trainer.is_global_zero:
            return
        if not all(of_rank["steps"] for of_rank in told):
            rank_zero_warn(
                f"ProfilerReport profiled no step: training ended within the first {self._first} steps, or each later "
                "step had a validation or the end of an epoch in it; give it a smaller wait or warmup, or train longer"
            )
            return
        name, options = identify(trainer.strategy)
        self.profile = profile_document.build(
            told,
            strategy=name,
            options=options,
            versions=versions_of(trainer.strategy.root_device),
            strategy_options=strategy_options(trainer.strategy),
            link_gbit=self._link_gbit,
        )
        if self._print_report:
            print(profile_text.text(self.profile))
        if self._write_files and not is_fast_dev_run(trainer):
            self._write(directory, [of_rank["events"] for of_rank in told])

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._abandon(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._abandon(trainer)

    def results(self) -> dict[str, Any]:
        """The attributes that a spawned rank 0 hands to the process that has started it."""
        return {"profile": self.profile, "path": self.path, "page_path": self.page_path}

    def _abandon(self, trainer: Trainer) -> None:
        if self._window is not None:
            self._window.stop(trainer)
            self._window = None

    def _told(self, window: _Window) -> dict[str, Any]:
        series = {key: series for monitor in self._monitors for key, series in monitor.series.items()}
        curves = {key: series[key].curve() for key in run_curves.KEYS if key in series}
        servers = None if self._servers is None else self._servers.histograms()
        return {**window.told(), "over_time": curves, "servers": servers}

    def _write(self, directory: str, events: Sequence[Sequence[Any]]) -> None:
        assert self.profile is not None
        path = Path(directory) / profile_document.FILE_NAME
        trace_path = path.with_name(profile_document.TRACE_NAME)
        page_path = path.with_name(profile_page.FILE_NAME)
        try:
            if "://" in directory:
                raise OSError("the folder is not on this machine; give the Trainer a local default_root_dir or logger")
            document.write(self.profile, path, indent=None)
            document.write(profile_document.trace(self.profile, events), trace_path, indent=None)
            document.write_bytes(profile_page.page(self.profile).encode(), page_path)
        except OSError as error:
            # Training has succeeded by now; a full disk must not make it look as if it had not.
            rank_zero_warn(f"the profile was not written to {directory}: {error}")
            return
        self.path, self.page_path = path, page_path
        if self._print_report:
            print(f"written to {page_path},\n{path}\nand {trace_path}")


class _Window:
    """The profiled steps of this rank.

    ::

        wait | warmup, active: recorded | reads of values | activations | operators | fewer threads, if too many
    """

    def __init__(
        self, trainer: Trainer, wait: int, warmup: int, active: int, *, operators: bool | None, activations: bool
    ) -> None:
        meter = getattr(trainer.strategy, "meter", None)
        self._meter = meter if isinstance(meter, Meter) else None
        self.now: Callable[[], float] = time.perf_counter if self._meter is None else self._meter.now
        self._rank = trainer.global_rank
        self._node = trainer.node_rank
        self._warmup, self._active = warmup, active
        self._left_to_wait = wait
        self._workers = _data_workers(trainer)
        self._recorder: ActionRecorder | None = None
        self._transfers: list[Transfer] = []
        self._exposed: list[tuple[float, float]] = []
        self._broadcasts: list[tuple[int, float, float, int]] = []
        self._ends_s: list[float] = []
        self._end_s = math.inf
        self._counted: list[tuple[float, float, int]] = []
        self._reads: ValueReads | None = None
        self._activations = activations
        self._memory: dict[str, int | None] = {}
        self._limit: tuple[str, int] | None = None
        self._records_operators = trainer.strategy.root_device.type == "cuda" if operators is None else operators
        self._operators = OperatorTrace(self.now)
        profiler = _profiler(trainer)
        self._theirs = profiler if isinstance(profiler, PyTorchProfiler) else None
        self._watching = ExitStack()
        self._clock: ClockOffset | None = None
        self._trial: _ThreadTrial | None = None
        self._stages: StageRecord | None = None
        self.batches = 0
        self.interrupted = False
        self._next: Callable[[Trainer], None] = self._waiting
        if wait == 0:
            self._record(trainer)

    def step_ends(self, trainer: Trainer) -> None:
        """An optimizer step has ended on this rank."""
        if self._theirs is not None and self._operators.take(self._theirs):
            self._theirs, self._records_operators = None, False
        self._next(trainer)
        self.batches = 0
        self.interrupted = False

    def close(self, trainer: Trainer) -> None:
        """Training has ended, maybe within the window; a collective where the ranks train together."""
        if self._meter is not None:
            self._meter.flush()
        self.stop(trainer)
        if self._clock is None and self._counted:
            self._complete(trainer)

    def stop(self, trainer: Trainer) -> None:
        """Puts back what the window has replaced."""
        self._stop_recording(trainer)
        self._watching.close()
        self._operators.stop()
        if self._trial is not None:
            self._trial.end()
        if self._meter is not None and self._meter.listener == self._heard:
            self._meter.listener = None
        self._next = _nothing

    def _stop_recording(self, trainer: Trainer) -> None:
        """The listener stays: what has begun in the window may end, or be known, later."""
        self._end_s = min(self._end_s, self.now())
        self._watching.close()
        if self._recorder is not None and _profiler(trainer) is self._recorder:
            _put_profiler(trainer, self._recorder.inner)

    def told(self) -> dict[str, Any]:
        """What this rank has measured, as JSON; times on its own clock."""
        spans = [] if self._recorder is None else self._recorder.spans
        steps = []
        for start_s, end_s, batches in self._counted:
            within = [span for span in spans if span.start_s < end_s and span.end_s > start_s]
            steps.append(
                {
                    "start_s": start_s,
                    "end_s": end_s,
                    "batches": batches,
                    "parts": [[p.name, p.start_s, p.end_s] for p in self._parts(within, start_s, end_s)],
                    "callbacks_s": _callbacks_s(within, start_s, end_s),
                    "transfers": [
                        [t.operation, t.group, t.group_size, *t.interval(), t.size_bytes, t.sent_bytes, t.memory_bytes]
                        for t in self._transfers
                        if start_s <= t.interval()[0] < end_s
                    ]
                    + [
                        ["broadcast", "Lightning", ranks, a, b, size, size if self._rank == 0 else 0, 0]
                        for ranks, a, b, size in self._broadcasts
                        if start_s <= a < end_s
                    ],
                }
            )  # fmt: skip
        clock = self._clock or ClockOffset(0.0, 0.0)
        return {
            "rank": self._rank,
            "node": self._node,
            "host": socket.gethostname(),
            "threads": torch.get_num_threads() if self._trial is None else self._trial.threads,
            "cores": usable_cores(),
            "data_workers": self._workers,
            "is_metered": self._meter is not None,
            "clock": asdict(clock),
            "steps": steps,
            "reads": [] if self._reads is None else self._reads.most(),
            "operators": self._operators.most,
            "events": self._operators.events,
            "launches": None if self._operators.launches is None else asdict(self._operators.launches),
            "memory": self._memory,
            "limit": self._limit,
            "trial": None if self._trial is None else self._trial.told(),
            "stages": None if self._stages is None else asdict(self._stages),
        }

    def _waiting(self, trainer: Trainer) -> None:
        self._left_to_wait -= 1
        if self._left_to_wait == 0:
            self._record(trainer)

    def _record(self, trainer: Trainer) -> None:
        self._recorder = ActionRecorder(_profiler(trainer), self.now)
        _put_profiler(trainer, self._recorder)
        if self._meter is not None:
            self._meter.listener = self._heard
        self._watching.enter_context(self._broadcasts_heard())
        self._watching.enter_context(self._logging_heard(trainer, self._recorder.spans))
        self._ends_s = [self.now()]
        self._next = self._recording

    def _recording(self, trainer: Trainer) -> None:
        now_s = self.now()
        start_s, self._ends_s = self._ends_s[-1], [now_s]
        if self.interrupted:
            return
        if self._warmup > 0:
            self._warmup -= 1
            return
        self._counted.append((start_s, now_s, self.batches))
        if len(self._counted) == self._active:
            self._stop_recording(trainer)
            self._complete(trainer)
            self._reads = ValueReads()
            self._watching.enter_context(self._reads.watched())
            self._next = self._reading

    def _reading(self, trainer: Trainer) -> None:
        self._watching.close()
        if self.interrupted:  # it counted a validation as well
            self._reads = ValueReads()
            self._watching.enter_context(self._reads.watched())
        else:
            self._count_activations(trainer)

    def _count_activations(self, trainer: Trainer) -> None:
        if not self._activations or self._stages is not None:  # a pipeline has counted them
            self._trace(trainer)
            return
        module = trainer.lightning_module
        self._saved = SavedActivations([*module.parameters(), *module.buffers()])
        self._watching.enter_context(self._saved.counted())
        self._next = self._counting

    def _counting(self, trainer: Trainer) -> None:
        self._watching.close()
        self._memory["activations_bytes"] = self._saved.peak_bytes
        self._trace(trainer)

    def _trace(self, trainer: Trainer) -> None:
        if not self._records_operators or self._theirs is not None:  # a second torch.profiler would empty the first
            self._try_threads(trainer)
            return
        self._operators.start()
        self._next = self._tracing

    def _tracing(self, trainer: Trainer) -> None:
        self._operators.stop()
        self._try_threads(trainer)

    def _try_threads(self, trainer: Trainer) -> None:
        self._next = _nothing
        hosts = _gathered_together(trainer, (socket.gethostname(), trainer.node_rank, torch.get_num_threads()))
        if trainer.strategy.root_device.type != "cpu" or hosts is None:
            return
        counts = Counter(host[:2] for host in hosts)
        if torch.get_num_threads() * max(counts.values()) > usable_cores() and torch.get_num_threads() > 1:
            self._trial = _ThreadTrial(max(1, usable_cores() // max(counts.values())), self.now)
            self._next = self._trying

    def _trying(self, trainer: Trainer) -> None:
        assert self._trial is not None
        if self._trial.step_ends(interrupted=self.interrupted):
            self._next = _nothing

    @contextmanager
    def _broadcasts_heard(self) -> Iterator[None]:
        """Lightning broadcasts before each batch whether rank 0 was sent a SIGTERM: an action that it does not name."""
        broadcast = dist.broadcast

        def timed(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            start_s = self.now()
            try:
                return broadcast(tensor, *args, **kwargs)
            finally:
                end_s = self.now()
                self._exposed.append((start_s, end_s))
                if "group" not in kwargs:  # the meter has those of this pack
                    self._broadcasts.append((dist.get_world_size(), start_s, end_s, tensor.nbytes))

        dist.broadcast = timed
        try:
            yield
        finally:
            dist.broadcast = broadcast

    @contextmanager
    def _logging_heard(self, trainer: Trainer, spans: list[Span]) -> Iterator[None]:
        """Lightning's loop calls loggers outside of all actions that it names."""

        def timed(logger: Logger) -> Callable[..., None]:
            log_metrics, name = logger.log_metrics, f"[Logger]{type(logger).__name__}.log_metrics"

            def log(*args: Any, **kwargs: Any) -> None:
                start_s = self.now()
                try:
                    log_metrics(*args, **kwargs)
                finally:
                    spans.append(Span(start_s, self.now(), name))

            return log

        own = [(logger, vars(logger).get("log_metrics")) for logger in trainer.loggers]
        for logger, _ in own:
            logger.log_metrics = timed(logger)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for logger, before in own:
                del logger.log_metrics
                if before is not None:  # that somebody else has put there
                    logger.log_metrics = before  # type: ignore[method-assign]

    def _heard(self, transfers: list[Transfer], exposed: list[tuple[float, float]]) -> None:
        self._transfers += [transfer for transfer in transfers if transfer.interval()[0] < self._end_s]
        self._exposed += [interval for interval in exposed if interval[0] < self._end_s]

    def _complete(self, trainer: Trainer) -> None:
        """The steps are recorded: takes the newest record of stages, and compares the clocks of ranks. A collective."""
        strategy, device = trainer.strategy, trainer.strategy.root_device
        if isinstance(strategy, MultiGPUStrategy):
            self._stages = strategy.stage_record()
        if device.type == "cuda":
            self._limit = "GPU", torch.cuda.get_device_properties(device).total_memory
        elif device.type == "cpu":
            self._limit = host_memory()[::2]
        memory = memory_of(trainer) if self._stages is None else self._stages.memory
        if memory is None:  # optimizer states are elsewhere
            held = asdict(measured_bytes(trainer.lightning_module.parameters(), []))
            self._memory = {kind: held[kind] for kind in ("parameters_bytes", "gradients_bytes")}
        else:
            self._memory = asdict(memory)
        if _gathered_together(trainer, 0) is None:
            self._clock = ClockOffset(0.0, 0.0)
        else:
            self._clock = clock_offsets(lambda moment: gather(trainer, moment), self.now)[trainer.global_rank]

    def _parts(self, spans: Sequence[Span], start_s: float, end_s: float) -> list[Span]:
        phases = [Span(s.start_s, s.end_s, phase) for s in spans if (phase := phase_of(s.name)) is not None]
        exposed = [Span(a, b, "communication") for a, b in self._exposed if a < end_s and b > start_s]
        passes: list[Span] = []
        for step in () if self._stages is None else self._stages.steps:
            if step.timeline and step.timeline[0].start_s >= start_s and step.timeline[-1].end_s <= end_s:
                passes.append(Span(step.timeline[0].start_s, step.timeline[-1].end_s, "stage_wait"))
                passes += [Span(i.start_s, i.end_s, _PASSES.get(i.kind, "stage_wait")) for i in step.timeline]
        return partition(phases, [exposed, passes], start_s, end_s)


class _ThreadTrial:
    """Steps with fewer threads; the first of them is not counted."""

    def __init__(self, fewer: int, now: Callable[[], float]) -> None:
        self.threads = torch.get_num_threads()
        self._fewer = fewer
        self._now = now
        self._seconds: list[float] = []
        self._last_s: float | None = None
        self._is_over = False
        torch.set_num_threads(fewer)

    def step_ends(self, *, interrupted: bool) -> bool:
        """Returns whether that was the last one."""
        now_s = self._now()
        if self._last_s is not None and not interrupted:
            self._seconds.append(now_s - self._last_s)
        self._last_s = now_s
        if len(self._seconds) == _TRIAL_STEPS:
            self.end()
            return True
        return False

    def end(self) -> None:
        """Sets the threads back; later changes of the program stay."""
        if not self._is_over:
            self._is_over = True
            torch.set_num_threads(self.threads)

    def told(self) -> dict[str, Any] | None:
        return {"threads": self._fewer, "step_s": median(self._seconds)} if self._seconds else None


def _nothing(trainer: Trainer) -> None:
    """The window is over."""


def _gathered_together(trainer: Trainer, value: Any) -> list[Any] | None:
    """One value of every rank; None where each rank trains at its own pace."""
    strategy = trainer.strategy
    if isinstance(strategy, MultiGPUStrategy) and strategy.newest_of_ranks("profile", 0) is not None:
        return None
    return gather(trainer, value)


def _profiler(trainer: Trainer) -> Profiler:
    # Lightning attaches it when the Trainer is made, without an annotation.
    profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]
    return profiler


def _put_profiler(trainer: Trainer, profiler: Profiler) -> None:
    trainer.profiler = profiler  # type: ignore[attr-defined]


def _data_workers(trainer: Trainer) -> int | None:
    workers = getattr(trainer.train_dataloader, "num_workers", None)
    return workers if isinstance(workers, int) else None


def _callbacks_s(spans: Sequence[Span], start_s: float, end_s: float) -> dict[str, float]:
    """Seconds of a step by callback, by hook of the module, and by logger, without what is no training."""
    totals: dict[str, float] = {}
    for span in spans:
        if phase_of(span.name) == "callbacks" and span.name.startswith(("[Callback]", "[LightningModule]", "[Logger]")):
            owner, _, hook = span.name.partition("]")[2].rpartition(".")
            name = f"{owner.partition('{')[0]}.{hook}"
            totals[name] = totals.get(name, 0.0) + min(span.end_s, end_s) - max(span.start_s, start_s)
    return dict(sorted(totals.items(), key=lambda item: -item[1])[:_CALLBACKS])
