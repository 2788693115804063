"""The table of a run's report on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_multigpu.planning.numbers import BYTES, number
from lightning_multigpu.report import pipeline_table

SPLIT_LAYERS = "split layers: "
"""The beginning of the purposes of collectives inside layers that are split over ranks."""

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


def render(report: Mapping[str, Any], *, terminal: bool) -> Table:
    """The aggregate figures that the report has, one a row; lines are plain characters unless for a terminal."""
    world = report["world"]
    table = Table(
        title=f"{report['strategy']['name']}: {_many(world['size'], 'rank')} on {_many(world['nodes'], 'node')}, "
        f"{_many(report['steps'], 'optimizer step')}",
        box=box.SIMPLE_HEAD if terminal else box.ASCII,
        caption="\n".join(_captions(report)),
    )
    table.add_column("")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    metrics = report["aggregate"]["metrics"]
    for label, key, base_unit in (*_ROWS, *_DEVICE_ROWS[report["hardware"]["device"]], *_PROCESS_ROWS):
        if key in metrics:
            statistics = metrics[key]
            unit, divisor = _scale(base_unit, statistics["median"])
            table.add_row(label, *(number(statistics[name] / divisor) for name in _COLUMNS), unit)
    return table


def show(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints the table to standard output or to ``console``; without colours and lines when that is no terminal."""
    console = Console() if console is None else console
    if not report["steps"]:
        console.print("No optimizer step was taken: there is nothing to report", highlight=False)
        return
    console.print(render(report, terminal=console.is_terminal))
    if "memory" in report:
        console.print(pipeline_table.memory(report["memory"], report["strategy"]["name"], terminal=console.is_terminal))
    if "pipeline" in report:
        pipeline_table.show(report["pipeline"], console)
    if "one_device" in report:
        console.print(one_device_line(report), highlight=False, soft_wrap=True)


def one_device_line(report: Mapping[str, Any]) -> str:
    """Whether the ranks were worth it: one line about a report that has the section ``one_device``."""
    found = report["one_device"]
    if "reason" in found:
        return f"no comparison with one device: {found['reason']}"
    ratio = f"{found['ratio']:.2g}"
    slower = ": slower than one device" if float(ratio) < 1 else ""
    threads = f"; one device with {_many(found['threads'], 'intra-op thread')}" if "threads" in found else ""
    return (
        f"{_many(report['world']['size'], 'rank')} train {ratio} x as many samples as one device would{slower} "
        f"(measured on the first steps, without loading{threads})"
    )


def _captions(report: Mapping[str, Any]) -> Iterator[str]:
    purposes = report.get("communication_ms", {})
    if purposes:
        inside = {name: ms for name, ms in purposes.items() if name.startswith(SPLIT_LAYERS)}
        purposes = {name: ms for name, ms in purposes.items() if name not in inside}
        if inside:
            worst = max(inside, key=lambda name: inside[name])
            most = f"inside split layers (most for {worst.removeprefix(SPLIT_LAYERS)}: {number(inside[worst])})"
            purposes[most] = sum(inside.values())
        parts = sorted(purposes.items(), key=lambda part: -part[1])
        yield f"all communication, means in ms: {', '.join(f'{purpose} {number(ms)}' for purpose, ms in parts)}"
    share = _exposed_share(report)
    if share is not None:
        yield share


def _exposed_share(report: Mapping[str, Any]) -> str | None:
    """The share of a step that communication costs, the first figure to look at."""
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
