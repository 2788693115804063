"""The picture of a strategies bench: the step of each strategy, and its communication."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from lightning_multigpu.bench.strategies.contenders import NO_COMMUNICATION
from lightning_multigpu.bench.strategies.strategy_run import StrategyResult


def draw(results: Sequence[StrategyResult], path: Path) -> None:
    """A bar a strategy: its median step with quartiles; a line where the step without communication ends."""
    drawn = [result for result in results if result.step_s is not None]
    size = (9, 1.2 + 0.5 * len(drawn))
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")
    panel = figure.subplots()
    spreads = [result.step_s.scaled(1e3) for result in drawn if result.step_s is not None]
    medians = [spread.median for spread in spreads]
    quartiles = [[s.median - s.p25 for s in spreads], [s.p75 - s.median for s in spreads]]
    bars = panel.barh([result.label for result in drawn], medians, xerr=quartiles, color="#56b4e9", capsize=3)
    panel.bar_label(bars, fmt="%.1f", padding=4)
    panel.invert_yaxis()
    alone = next((ms for result, ms in zip(drawn, medians, strict=True) if result.label == NO_COMMUNICATION), None)
    if alone is not None:
        panel.axvline(alone, linestyle=":", color="gray")
    panel.set(xlabel="ms a step, median and quartiles on the slowest rank; beyond the dotted line: communication")
    panel.margins(x=0.12)
    figure.savefig(path)
