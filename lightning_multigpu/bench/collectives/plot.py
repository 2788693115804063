"""The picture of a collectives bench: time and bus bandwidth over size."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_multigpu.bench.sizes import size_text

if TYPE_CHECKING:
    from lightning_multigpu.bench.collectives.collective_run import CollectiveResult

FORMATS = ("png", "svg", "pdf")


def check_plot(path: Path) -> None:
    """Checks that a picture can be drawn into a file of that name.

    Raises:
        ValueError: matplotlib is not installed, or the name's ending is none of :data:`FORMATS`.
    """
    if path.suffix.removeprefix(".") not in FORMATS:
        raise ValueError(f"--plot={path}: a picture's name ends in one of {', '.join(FORMATS)}")
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise ValueError(
            "--plot needs matplotlib, which is not installed; pip install 'lightning-multigpu[plot]'"
        ) from error


def draw(results: Sequence[CollectiveResult], path: Path, *, world_size: int, link_gbit: float | None) -> None:
    """One row of panels an operation that moves something: median time with quartiles, and bus bandwidth."""
    drawn = [result for result in results if result.seconds is not None and result.operation.has_size]
    operations = list(dict.fromkeys(result.operation.name for result in drawn))
    num_rows = max(1, len(operations))
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(11, 3.4 * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, 2, squeeze=False)
    for (time, bandwidth), operation in zip(panels, operations, strict=False):
        for name in dict.fromkeys(result.implementation for result in drawn):
            rows = [r for r in drawn if r.operation.name == operation and r.implementation == name]
            if rows:
                _draw_line(time, bandwidth, name, rows, world_size)
        if link_gbit is not None:
            bandwidth.axhline(link_gbit / 8, linestyle=":", color="gray", label=f"{link_gbit / 8:g} GB/s")
        for panel, unit in ((time, "us"), (bandwidth, "busbw, GB/s")):
            panel.set(xscale="log", yscale="log", title=operation, xlabel="size", ylabel=unit)
            _label_sizes(panel, sorted({r.size_bytes for r in drawn if r.operation.name == operation}))
            panel.grid(alpha=0.3)
            panel.legend()
    figure.savefig(path)


def _draw_line(time: Any, bandwidth: Any, name: str, rows: Sequence[CollectiveResult], world_size: int) -> None:
    sizes = [row.size_bytes for row in rows]
    spreads = [row.seconds.scaled(1e6) for row in rows if row.seconds is not None]
    (line,) = time.plot(sizes, [spread.median for spread in spreads], marker="o", markersize=3, label=name)
    quartiles = [[getattr(spread, quartile) for spread in spreads] for quartile in ("p25", "p75")]
    time.fill_between(sizes, *quartiles, alpha=0.2, color=line.get_color())
    speeds = [(row.busbw(world_size) or 0.0) / 1e9 for row in rows]
    bandwidth.plot(sizes, speeds, marker="o", markersize=3, label=name, color=line.get_color())


def _label_sizes(panel: Any, sizes: Sequence[int]) -> None:
    shown = sizes[:: max(1, -(-len(sizes) // 7))]
    panel.set_xticks(shown, [size_text(size) for size in shown], fontsize=7)
    panel.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
