"""A report as a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_multigpu.report import pipeline_table
from lightning_multigpu.report.numbers import BYTES, number

_COLUMNS = ("median", "mean", "p95")


@dataclass(frozen=True)
class _Row:
    label: str
    key: str
    unit: str


_ROWS = (
    _Row("throughput", "throughput/samples_per_sec", "samples/s"),
    _Row("", "throughput/tokens_per_sec", "tokens/s"),
    _Row("model FLOPs utilization", "throughput/mfu", "share"),
    _Row("step time", "throughput/step_ms", "ms"),
    _Row("all-reduce time per step", "communication/all_reduce_ms", "ms"),
    _Row("all communication per step", "communication/total_ms", "ms"),
    _Row("exposed communication per step", "communication/exposed_ms", "ms"),
    _Row("sent per step and rank", "communication/sent_bytes", "bytes"),
    _Row("of that through shared memory", "communication/memory_bytes", "bytes"),
    _Row("bus bandwidth of the all-reduce", "communication/busbw_gb_per_sec", "GB/s"),
    _Row("device utilization", "device/utilization_percent", "%"),
    _Row("device memory in use", "device/memory_used_bytes", "bytes"),
    _Row("power", "device/power_watts", "W"),
)


def render(report: Mapping[str, Any], *, terminal: bool) -> Table:
    """The aggregate figures that the report has, one a row; lines are plain characters unless for a terminal."""
    world = report["world"]
    table = Table(
        title=f"{report['strategy']['name']}: {_many(world['size'], 'rank')} on {_many(world['nodes'], 'node')}, "
        f"{_many(report['steps'], 'optimizer step')}",
        box=box.SIMPLE_HEAD if terminal else box.ASCII,
        caption=_exposed_share(report),
    )
    table.add_column("")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    metrics = report["aggregate"]["metrics"]
    for row in _ROWS:
        if row.key in metrics:
            statistics = metrics[row.key]
            unit, divisor = _scale(row.unit, statistics["median"])
            table.add_row(row.label, *(number(statistics[name] / divisor) for name in _COLUMNS), unit)
    return table


def show(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints the table to standard output or to ``console``; without colours and lines when that is no terminal."""
    console = Console() if console is None else console
    console.print(render(report, terminal=console.is_terminal))
    if "pipeline" in report:
        pipeline_table.show(report["pipeline"], console)


def _exposed_share(report: Mapping[str, Any]) -> str | None:
    """How much of a step communication costs, the first thing to look at."""
    metrics = report["aggregate"]["metrics"]
    exposed, step = metrics.get("communication/exposed_ms"), metrics.get("throughput/step_ms")
    if exposed is None or step is None:
        return None
    return f"ranks wait for communication for {100 * exposed['mean'] / step['mean']:.1f} % of their time"


def _scale(unit: str, value: float) -> tuple[str, float]:
    if unit == "bytes":
        for name, size in BYTES:
            if abs(value) >= size:
                return name, size
    return unit, 1.0


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
