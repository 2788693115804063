"""Monitor of the time and bytes that communication between ranks takes."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_multigpu.callbacks.monitor import Group, Monitor
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.metering.traffic import StepTraffic, sent_share
from lightning_multigpu.engine.parameter_server.server_statistics import summary
from lightning_multigpu.report.sections import SPLIT_LAYERS
from lightning_multigpu.strategies.run_view import view_of

_PURPOSES: dict[tuple[str | None, str], str] = {
    ("all_reduce", "data"): "all-reduce of gradients",
    ("broadcast", "data"): "buffers",
    ("push", "host"): "gradients to the host",
    ("pull", "host"): "weights from the host",
    ("push", "servers"): "gradients to the servers",
    ("pull", "servers"): "weights from the servers",
    ("broadcast", "devices"): "model to the devices",
    ("scatter", "devices"): "batches to the devices",
    ("gather", "devices"): "outputs from the devices",
    ("reduce", "devices"): "sum of gradients",
    **dict.fromkeys([("reduce", "shards"), ("reduce_scatter", "shards")], "gradients to their owners"),
    **dict.fromkeys([("broadcast", "shards"), ("all_gather", "shards")], "new parameters from their owners"),
    ("all_reduce", "shards"): "norms and flags",
    (None, "checkpoint"): "optimizer states for checkpoints",
    (None, "control"): "messages that keep ranks in step",
    (None, "pipeline"): "between stages",
    (None, "metrics"): "metrics",
    (None, "world"): "metrics and figures of monitors",
    (None, "replicas"): "check of replicas",
    (None, "user"): "your own groups",
}
"""The purpose of an operation in a group of the meter, for people; None stands for any operation."""

DATA_AXIS = "data"
"""The meter's group of gradients; metric reductions and the like have groups of their own."""


def figures(step: StepTraffic) -> dict[str, tuple[float, float]]:
    """The figures of one optimizer step of one rank, each with its weight in a mean.

    The weight of a bandwidth is the time that it was measured over, so that the mean is bytes over time.
    """
    values = {
        "communication/total_ms": (step.total_s * 1e3, 1.0),
        "communication/exposed_ms": (step.exposed_s * 1e3, 1.0),
        "communication/sent_bytes": (float(step.sent_bytes), 1.0),
        "communication/memory_bytes": (float(step.memory_bytes), 1.0),
    }
    for operation in ("push", "pull"):
        if exchanges := [totals for totals in step.operations if totals.operation == operation]:
            values[f"parameter_server/{operation}_ms"] = (1e3 * sum(totals.total_s for totals in exchanges), 1.0)
    gradients = [totals for totals in step.of("all_reduce", DATA_AXIS) if totals.group_size > 1]
    seconds = sum(totals.total_s for totals in gradients)
    if gradients:
        values["communication/all_reduce_ms"] = (seconds * 1e3, 1.0)
    if seconds > 0:
        bus_bytes = sum(totals.size_bytes * sent_share("all_reduce", totals.group_size) for totals in gradients)
        values["communication/algbw_gb_per_sec"] = (sum(t.size_bytes for t in gradients) / seconds / 1e9, seconds)
        values["communication/busbw_gb_per_sec"] = (bus_bytes / seconds / 1e9, seconds)
    return values


def purpose_of(operation: str, group: str) -> str:
    """The purpose of an operation in a group of the meter, in words."""
    known = _PURPOSES.get((operation, group)) or _PURPOSES.get((None, group))
    if group.startswith("tensor "):  # a layer that is split over ranks, or what belongs to all of them
        return f"{SPLIT_LAYERS}{group.removeprefix('tensor ')}"
    return known or f"{operation} in the group {group!r}"


class CommunicationMonitor(Monitor):
    """Time and bytes of the communication between ranks, per optimizer step, read from the strategy's meter.

    Strategies without a meter (Lightning's own) get a warning and no figures. A world of one rank gets no figures
    either, since nothing is communicated; under ``dp`` the figures are those of its devices. A transfer outside an
    optimizer step counts for the next step, unless the strategy discards it.

    Keys; the run's value is the mean over the ranks:

    - `communication/all_reduce_ms` (ms): time in gradient all-reduces, hidden or not; over the steps that had one.
    - `communication/total_ms` (ms): time in which a transfer of any kind was under way, hidden or not.
    - `communication/exposed_ms` (ms): the part of `total_ms` that computation did not hide: the main thread (on a GPU:
      the compute stream) waited.
    - `communication/sent_bytes` (bytes): payload that a rank sent per optimizer step, of any kind.
    - `communication/memory_bytes` (bytes): the part of `sent_bytes` that went through memory shared with ranks or
      servers of the same host.
    - `communication/algbw_gb_per_sec` (1e9 bytes/s): algorithm bandwidth of the gradient all-reduces, bytes over
      `all_reduce_ms`.
    - `communication/busbw_gb_per_sec` (1e9 bytes/s): bus bandwidth, `algbw_gb_per_sec` times 2(n-1)/n for the n ranks
      of the data axis: comparable with the speed of the link for every n.
    - `parameter_server/push_ms` (ms): time in which gradients were on their way to the host or to servers; over the
      steps that had such a push.
    - `parameter_server/pull_ms` (ms): time from the request of a step to the arrival of all new weights.
    - `parameter_server/staleness_median`, `parameter_server/staleness_p95` and `parameter_server/staleness_max`
      (updates), under `async_ps`: staleness of the updates of all ranks since the last log. Staleness is the number of
      updates that other ranks made between a rank's pull of the weights and its update.

    Args:
        log: whether to log, or only to collect for a report.
    """

    group: ClassVar[Group] = "communication"

    def __init__(self, *, log: bool = True) -> None:
        super().__init__(log=log)
        self._steps_read = 0
        self._seconds: dict[str, float] = {}

    def purposes_ms(self) -> dict[str, float]:
        """The parts of ``total_ms`` by their purpose, means over the steps but the first; parts overlap in time."""
        steps = self._steps_read - self.warm_up
        return {purpose: 1e3 * seconds / steps for purpose, seconds in self._seconds.items()} if steps > 0 else {}

    @override
    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._view = view_of(trainer)
        self._meter = self._view.meter if self.measures(trainer) else None
        self._counted = self._staleness()
        self._next_step = 0 if self._meter is None else self._meter.steps_ended
        self._steps_read = 0
        self._seconds = {}
        if self._view.meter is None and trainer.world_size > 1:
            rank_zero_warn(
                f"communication is not measured: {type(trainer.strategy).__name__} has no meter; the strategies of "
                "lightning_multigpu do, strategy='ring_ddp' for example."
            )

    @override
    def measures(self, trainer: Trainer) -> bool:
        view = view_of(trainer)
        return view.meter is not None and trainer.world_size * view.devices_per_rank > 1

    @override
    def collect(self, trainer: Trainer, pl_module: LightningModule, batch: object) -> None:
        if self._meter is not None:
            self._read(self._meter)

    @override
    def settle(self) -> None:
        # The newest step may have transfers under way, so it may count for the next interval; forcing it would lose
        # them. Only the first interval must not be empty: callbacks that monitor a key want to find it.
        if not self.series:
            self.finish()
        self._observe_servers()

    @override
    def finish(self) -> None:
        if self._meter is not None:
            self._meter.flush()
            self._read(self._meter)

    def _staleness(self) -> Counter[int]:
        """How often updates of any rank have had which staleness so far."""
        told = self._view.server_statistics() if self._log else None
        return sum(told.staleness.values(), Counter()) if told else Counter()

    def _observe_servers(self) -> None:
        """Takes over what the servers have counted since the last time."""
        counted = self._staleness()
        fresh, self._counted = counted - self._counted, counted
        for name, value in summary(fresh).items() if fresh else ():
            self.observe(f"parameter_server/staleness_{name}", value)

    def _read(self, meter: Meter) -> None:
        """Takes over the steps that the meter has finished since the last time."""
        fresh: list[StepTraffic] = []
        for step in reversed(meter.steps):
            if step.index < self._next_step:
                break
            fresh.append(step)
        for step in reversed(fresh):
            self._next_step = step.index + 1
            self._steps_read += 1
            if self._steps_read > self.warm_up:
                for totals in step.operations:
                    purpose = purpose_of(totals.operation, totals.group)
                    self._seconds[purpose] = self._seconds.get(purpose, 0.0) + totals.total_s
            for key, (value, weight) in figures(step).items():
                self.observe(key, value, weight)
