"""The report of a whole fit, as text and as a file."""

from __future__ import annotations

import json
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_multigpu.callbacks.communication import CommunicationMonitor
from lightning_multigpu.callbacks.device_utilization import DeviceUtilizationMonitor
from lightning_multigpu.callbacks.monitor import KEYS, Monitor
from lightning_multigpu.callbacks.probes import machine_of
from lightning_multigpu.callbacks.throughput import ThroughputMonitor
from lightning_multigpu.planning.split_plan import SplitPlan
from lightning_multigpu.report import document
from lightning_multigpu.report.schema import as_json, from_json
from lightning_multigpu.report.text import text
from lightning_multigpu.strategies.run_view import view_of

_Monitor = TypeVar("_Monitor", bound=Monitor)


@dataclass(frozen=True, kw_only=True)
class _Told:
    """What a rank sends to rank 0: its record, what runs, and the servers."""

    record: document.RankRecord
    facts: document.RunFacts
    servers: Mapping[str, Any] | None


class RunReport(Callback):
    """Prints the throughput, communication and device use of a fit, and writes them to ``multigpu_report.json``.

    The file goes to ``trainer.log_dir``, else to ``trainer.default_root_dir``, is replaced atomically and follows
    :class:`~lightning_multigpu.report.document.RunDocument`. It is written however a fit ends in order: by
    ``max_epochs``, ``max_steps``, ``max_time`` or early stopping. A fit that fails or is interrupted writes none, and
    leaves one that an earlier fit wrote; ``fast_dev_run`` prints the report only, like Lightning writes no logs then.

    It needs no other callback. Figures come from the monitors among the trainer's callbacks (so give options such as
    ``tokens_fn`` to a :class:`ThroughputMonitor` of your own). For monitors that the trainer lacks, the report has
    silent ones of its own.

    Args:
        print_table: whether rank 0 prints the report.
        write_file: whether rank 0 writes the file.

    Raises:
        ValueError: at the start of a fit, the Trainer has several reports.
    """

    def __init__(self, *, print_table: bool = True, write_file: bool = True) -> None:
        self.report: dict[str, Any] | None = None
        """The newest report, as a dictionary, on every rank (under `async_ps` on rank 0); None before the first."""
        self.path: Path | None = None
        """The path of the newest report, on rank 0."""
        self._servers: Mapping[str, Any] | None = None
        self._memory: document.HeldMemory | None = None
        self._own: list[Monitor] = []
        self._split_plan: SplitPlan | None = None
        self._gathered: list[Any] | None = None
        self._print_table = print_table
        self._write_file = write_file

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reports = [type(each).__name__ for each in trainer.callbacks if isinstance(each, RunReport)]  # type: ignore[attr-defined]
        if len(reports) > 1:
            raise ValueError(f"{', '.join(reports)} in one Trainer: they write the same files; leave one in")
        self._start_s = time.perf_counter()
        self._facts, self._view = _facts(trainer, pl_module), view_of(trainer)
        self._throughput = self._monitor(trainer, ThroughputMonitor)
        self._communication = self._monitor(trainer, CommunicationMonitor)
        self._devices = self._monitor(trainer, DeviceUtilizationMonitor)
        self.path, self._servers, self._gathered, self._memory = None, None, None, None
        self._directory = trainer.log_dir or trainer.default_root_dir  # a broadcast: every rank must ask

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._gathered = self._view.gather_at_end(lambda: as_json(self._told(trainer)))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._memory is None or trainer.is_last_batch:
            self._memory = self._held(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        counted = self._view.server_statistics()
        self._servers = None if counted is None else counted.section()
        self._split_plan = self._view.split_plan()
        held = self._held(trainer)
        if not held.gradients_bytes and self._memory is not None:  # Lightning has freed them
            held = replace(held, gradients_bytes=self._memory.gradients_bytes)
        self._memory = held

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._gathered is None:
            gathered = self._view.gather(as_json(self._told(trainer)))
        elif not trainer.is_global_zero:
            return
        else:
            gathered = self._gathered
        told = [from_json(_Told, each) for each in gathered]
        name, options = identify(trainer.strategy)
        report = document.build(
            [each.record for each in told],
            told[0].facts,
            strategy={"name": name, "options": options},
            versions=versions_of(trainer.strategy.root_device),
            aggregations=KEYS,
            parameter_servers=told[0].servers,
            tensor_split=self._split_plan,
            member_changes=self._view.member_changes(),
            all_options=self._view.options,
        )
        self.report = as_json(report)
        if not trainer.is_global_zero:
            return
        if self._print_table:
            print(text(report))
        if self._write_file and not trainer.fast_dev_run:  # type: ignore[attr-defined]  # attached, not annotated
            self._write(self.files(report))

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Reports on the steps before a Ctrl-C, if all ranks have ended at the same batch."""
        fits = trainer.state.fn == TrainerFn.FITTING and trainer.global_step > 0
        is_stop = isinstance(exception, KeyboardInterrupt) and view_of(trainer).is_common(exception)
        if is_stop and fits and self._gathered is None:
            for monitor in self._own:
                monitor.on_train_end(trainer, pl_module)
            self.on_train_end(trainer, pl_module)
            self.on_fit_end(trainer, pl_module)
        self._remove_monitors(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._remove_monitors(trainer)

    def _told(self, trainer: Trainer) -> _Told:
        facts = replace(self._facts, wall_s=time.perf_counter() - self._start_s)
        return _Told(record=self.record(trainer), facts=facts, servers=self._servers)

    def record(self, trainer: Trainer) -> document.RankRecord:
        """This rank's part of the report."""
        monitors = (self._throughput, self._communication, self._devices)
        return document.RankRecord(
            rank=trainer.global_rank,
            node=trainer.node_rank,
            host=socket.gethostname(),
            steps=self._throughput.steps,
            metrics={key: value for monitor in monitors for key, value in monitor.statistics().items()},
            step_samples=self._throughput.step_samples,
            communication_ms=self._communication.purposes_ms(),
            memory=self._memory,
        )

    def _held(self, trainer: Trainer) -> document.HeldMemory:
        """The bytes that this rank holds."""
        device = trainer.strategy.root_device
        peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        held = vars(self._view.held_bytes())
        return document.HeldMemory(rank=trainer.global_rank, **held, device_peak_bytes=peak_bytes)

    def files(self, report: document.RunDocument) -> dict[str, bytes]:
        """What is written, by name; the document first."""
        return {document.FILE_NAME: document.encoded(as_json(report))}

    def results(self) -> dict[str, Any]:
        """The attributes that a spawned rank 0 hands to the process that has started it."""
        return {"report": self.report, "path": self.path}

    def _monitor(self, trainer: Trainer, kind: type[_Monitor]) -> _Monitor:
        """The Trainer's monitor of this kind, else a silent one, which is the Trainer's until the end of the fit."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # Lightning attaches it without an annotation
        for callback in callbacks:
            if isinstance(callback, kind):
                return callback
        made = kind(log=False)
        self._own.append(made)
        further = range(callbacks.index(self) + 1, len(callbacks))
        # Lightning puts checkpoints last, so that a step ends before its checkpoint is written.
        callbacks.insert(next((i for i in further if isinstance(callbacks[i], Checkpoint)), len(callbacks)), made)
        return made

    def _remove_monitors(self, trainer: Trainer) -> None:
        for monitor in self._own:
            monitor.end()
            trainer.callbacks.remove(monitor)  # type: ignore[attr-defined]
        self._own = []

    def _write(self, files: Mapping[str, bytes]) -> None:
        """Writes files by name.

        A failure is a warning: training has succeeded by now; a full disk must not make it look as if it had not.
        """
        paths = [Path(self._directory) / name for name in files]
        try:
            if "://" in self._directory:
                raise OSError(
                    "the folder is not on this machine; set a local default_root_dir or logger of the Trainer"
                )
            for path, contents in zip(paths, files.values(), strict=True):
                document.write_bytes(contents, path)
        except OSError as error:
            rank_zero_warn(f"the report was not written to {self._directory}: {error}")
            return
        self.path = paths[0]
        if self._print_table:
            print("written to " + "\nand ".join(map(str, paths)))


def _facts(trainer: Trainer, module: LightningModule) -> document.RunFacts:
    """What runs, on what, and since when."""
    parameters = list(module.parameters())
    device_type = trainer.strategy.root_device.type
    return document.RunFacts(
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        wall_s=0.0,
        model=document.TrainedModel(
            class_=f"{type(module).__module__}.{type(module).__qualname__}",
            parameters=sum(parameter.numel() for parameter in parameters),
            trainable_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        ),
        precision=str(trainer.precision),
        hardware={
            "device": "cuda" if device_type == "cuda" else "cpu",
            "threads_per_rank": torch.get_num_threads(),
            **machine_of(device_type),
        },
    )


def identify(strategy: Strategy) -> tuple[str, dict[str, Any]]:
    """The registered name that leaves the fewest options to add, and these options, as JSON has them.

    Of Lightning's own strategies it is the first name of the class, without options.
    """
    options: dict[str, Any] = getattr(strategy, "options", {})
    best: tuple[str, dict[str, Any]] | None = None
    for name in StrategyRegistry:
        made = StrategyRegistry[name]["strategy"]
        if getattr(made, "strategy", made) is type(strategy):  # those of this pack are rows
            usual = StrategyRegistry.get(name).options if options else {}
            further = {option: value for option, value in options.items() if usual[option] != value}
            best = min(best or (name, further), (name, further), key=lambda found: len(found[1]))
    name, further = best or (type(strategy).__name__, options)
    return name, json.loads(json.dumps(further, default=_name_of))


def _name_of(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def versions_of(device: torch.device) -> dict[str, str]:
    from lightning_multigpu import __version__

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "lightning_multigpu": __version__,
    }
    if device.type == "cuda":
        versions["gpu"] = torch.cuda.get_device_name(device)
        if torch.version.cuda is not None:
            versions["cuda"] = torch.version.cuda
    return versions
