"""Pictures of the benches, by matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_multigpu.bench.sizes import size_text

if TYPE_CHECKING:
    from lightning_multigpu.bench.collectives.collective_run import CollectiveResult
    from lightning_multigpu.bench.strategies.strategy_run import StrategyResult

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


def draw_collectives(results: Sequence[CollectiveResult], path: Path) -> None:
    """A panel an operation that has sizes: median time over size, with quartiles, a line an implementation."""
    drawn = [result for result in results if result.seconds is not None and result.operation.has_size]
    operations = list(dict.fromkeys(result.operation.name for result in drawn))
    size = (7, 3.4 * max(1, len(operations)))
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")
    for (panel,), operation in zip(figure.subplots(max(1, len(operations)), squeeze=False), operations, strict=False):
        rows = [result for result in drawn if result.operation.name == operation]
        for name in dict.fromkeys(row.implementation for row in rows):
            own = [row for row in rows if row.implementation == name]
            sizes = [row.size_bytes for row in own]
            times_us = [row.seconds.scaled(1e6) for row in own if row.seconds is not None]
            (line,) = panel.plot(sizes, [time.median for time in times_us], marker="o", markersize=3, label=name)
            quartiles = [time.p25 for time in times_us], [time.p75 for time in times_us]
            panel.fill_between(sizes, *quartiles, alpha=0.2, color=line.get_color())
        panel.set(xscale="log", yscale="log", title=operation, xlabel="size", ylabel="us")
        shown = sorted({row.size_bytes for row in rows})
        shown = shown[:: max(1, -(-len(shown) // 7))]
        panel.set_xticks(shown, [size_text(size) for size in shown], fontsize=7)
        panel.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(path)


def draw_strategies(results: Sequence[StrategyResult], path: Path) -> None:
    """A bar a strategy: its median step with quartiles; a line where the first step, that without communication, ends.

    Args:
        results: those of "no communication" first.
        path: of the file.
    """
    spreads = {result.label: result.step_s.scaled(1e3) for result in results if result.step_s is not None}
    size = (9, 1.2 + 0.5 * len(spreads))
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")
    panel = figure.subplots()
    medians = [spread.median for spread in spreads.values()]
    quartiles = [[s.median - s.p25 for s in spreads.values()], [s.p75 - s.median for s in spreads.values()]]
    bars = panel.barh(list(spreads), medians, xerr=quartiles, color="#56b4e9", capsize=3)
    panel.bar_label(bars, fmt="%.1f", padding=4)
    panel.invert_yaxis()
    if results[0].label in spreads:
        panel.axvline(medians[0], linestyle=":", color="gray")
    panel.set(xlabel="ms a step, median and quartiles on the slowest rank; beyond the dotted line: communication")
    panel.margins(x=0.12)
    figure.savefig(path)
