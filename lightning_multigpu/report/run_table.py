"""The report of a run on the terminal: its verdict, then tables of its figures and of its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_multigpu.planning.diagnosis import SMALLEST_SHARE
from lightning_multigpu.planning.numbers import BYTES, number, size
from lightning_multigpu.report.document import HeldMemory, RunDocument
from lightning_multigpu.report.schema import as_json, from_json
from lightning_multigpu.report.terminal import say

SPLIT_LAYERS = "split layers: "
"""The beginning of the purposes of collectives inside layers that are split over ranks."""

BETWEEN_STAGES = "between stages"
"""The purpose of messages between the stages of a pipeline."""

_COLUMNS = ("median", "mean", "p95")

_ROWS = (
    ("throughput", "throughput/samples_per_sec", "samples/s"),
    ("", "throughput/tokens_per_sec", "tokens/s"),
    ("model FLOPs utilization", "throughput/mfu", "share"),
    ("step time", "throughput/step_ms", "ms"),
    ("all-reduce time per step", "communication/all_reduce_ms", "ms"),
    ("all communication per step", "communication/total_ms", "ms"),
    ("exposed communication per step", "communication/exposed_ms", "ms"),
    ("sent per step and rank", "communication/sent_bytes", "bytes"),
    ("of that through shared memory", "communication/memory_bytes", "bytes"),
    ("bus bandwidth of the all-reduce", "communication/busbw_gb_per_sec", "GB/s"),
)
_DEVICE_ROWS = {
    # On a CPU the memory in use is that of all programs of the host, which tells nothing about the run.
    "cpu": (("use of a rank's own cores", "device/utilization_percent", "%"),),
    "cuda": (
        ("GPU utilization", "device/utilization_percent", "%"),
        ("memory in use of a GPU, all processes", "device/memory_used_bytes", "bytes"),
        ("power of all GPUs", "device/power_watts", "W"),
    ),
}
_PROCESS_ROWS = (("main memory of the largest process", "device/process_rss_bytes", "bytes"),)
_MEMORY = {
    "parameters_bytes": "parameters",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "device_peak_bytes": "GPU, at most",
}


def show(report: RunDocument | Mapping[str, Any], console: Console | None = None) -> None:
    """Prints the report to standard output or to ``console``; without colours and lines when that is no terminal.

    Raises:
        ReportError: ``report`` is a mapping that does not follow the schema.
    """
    console = Console() if console is None else console
    if not isinstance(report, RunDocument):
        report = from_json(RunDocument, report)
    if not report.steps:
        say(console, "No optimizer step was taken: there is nothing to report")
        return
    if (found := verdict(report)) is not None:
        say(console, found)
    console.print(_figures(report, console))
    if report.memory is not None:
        console.print(_memory(report.memory, report.strategy.name, console))


def verdict(report: RunDocument) -> str | None:
    """What communication costs, and the step with half of the transfers; None where that was not measured."""
    metrics = report.aggregate.metrics
    if not {"communication/exposed_ms", "throughput/step_ms"} <= metrics.keys():
        return None
    exposed_ms, step_ms = (metrics[key]["mean"] for key in ("communication/exposed_ms", "throughput/step_ms"))
    share = exposed_ms / step_ms
    found = f"A step takes {number(step_ms)} ms: ranks wait for communication for {100 * share:.1f} % of their time."
    carries_activations = report.tensor_split is not None or BETWEEN_STAGES in (report.communication_ms or {})
    if share < 2 * SMALLEST_SHARE or carries_activations:  # they travel with each batch, however large
        return found
    return (
        f"{found}\nWith batches of twice the size, {number(step_ms - exposed_ms / 2)} ms are predicted for as many "
        "samples. ProfilerReport looks for the cause."
    )


def _figures(report: RunDocument, console: Console) -> Table:
    """The aggregate figures that the report has, one a row."""
    world = report.world
    table = _framed(
        f"{escape(report.strategy.name)}: {_many(world.size, 'rank')} on {_many(world.nodes, 'node')}, "
        f"{_many(report.steps, 'optimizer step')}",
        console,
    )
    table.caption = escape(_purposes(report.communication_ms or {}) or "") or None
    table.add_column("")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    metrics = report.aggregate.metrics
    for label, key, base_unit in (*_ROWS, *_DEVICE_ROWS[report.hardware.device], *_PROCESS_ROWS):
        if key in metrics:
            statistics = metrics[key]
            unit, divisor = _scale(base_unit, statistics["median"])
            table.add_row(label, *(number(statistics[name] / divisor) for name in _COLUMNS), unit)
    return table


def _purposes(purposes: Mapping[str, float]) -> str | None:
    """The parts of communication by purpose, the longest first; those inside split layers together."""
    if not purposes:
        return None
    inside = {name: ms for name, ms in purposes.items() if name.startswith(SPLIT_LAYERS)}
    purposes = {name: ms for name, ms in purposes.items() if name not in inside}
    if inside:
        worst = max(inside, key=lambda name: inside[name])
        most = f"inside split layers (most for {worst.removeprefix(SPLIT_LAYERS)}: {number(inside[worst])})"
        purposes[most] = sum(inside.values())
    parts = sorted(purposes.items(), key=lambda part: -part[1])
    return f"all communication, means in ms: {', '.join(f'{purpose} {number(ms)}' for purpose, ms in parts)}"


def _memory(held: Sequence[HeldMemory], name: str, console: Console) -> Table:
    ranks = [as_json(rank) for rank in held]
    table = _framed(f"{escape(name)}: memory of the ranks", console)
    table.add_column("rank", justify="right")
    shown = [key for key in _MEMORY if any(key in rank for rank in ranks)]
    for key in shown:
        table.add_column(_MEMORY[key], justify="right", no_wrap=True)
    for rank in ranks:
        table.add_row(str(rank["rank"]), *(size(rank[key]) if key in rank else "" for key in shown))
    return table


def _framed(title: str, console: Console) -> Table:
    """A table without columns, whose lines are plain characters unless for a terminal."""
    return Table(title=title, box=box.SIMPLE_HEAD if console.is_terminal else box.ASCII)


def _scale(unit: str, value: float) -> tuple[str, float]:
    if unit == "bytes":
        for name, factor in BYTES:
            if abs(value) >= factor:
                return name, factor
    return unit, 1.0


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
