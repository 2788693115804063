"""The table of strategies and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_multigpu.bench.strategies.contenders import NO_COMMUNICATION
from lightning_multigpu.bench.strategies.strategy_run import StrategyResult

SCHEMA_VERSION = 1


class StrategiesTable:
    """Sets results against a baseline and against the step without communication.

    Args:
        results: of one run.
        baseline: the label of the row that is 1.0.
    """

    def __init__(self, results: Sequence[StrategyResult], baseline: str) -> None:
        self._results = results
        self._baseline_s = self._median_of(baseline)
        self._silent_s = self._median_of(NO_COMMUNICATION)

    def lines(self) -> list[str]:
        """The table; times in ms."""
        width = max(len("strategy"), *(len(result.label) for result in self._results))
        lines = [
            f"{'# strategy':<{width + 2}} {'step':>8} {'25 %':>8} {'75 %':>8} {'ratio':>6}  {'comm. cost':>10} "
            f"{'ratio':>6}  {'metered':>8} {'hidden':>8} {'exposed':>8} {'sent':>9} {'samples':>9}",
            f"{'#':<{width + 2}} {'(ms)':>8} {'(ms)':>8} {'(ms)':>8} {'':>6}  {'(ms)':>10} {'':>6}"
            f"  {'(ms)':>8} {'(ms)':>8} {'(ms)':>8} {'(MB)':>9} {'(1/s)':>9}",
        ]
        for result in self._results:
            if result.step_s is None:
                lines.append(f"  {result.label:<{width}} {result.status}: {result.reason}")
                continue
            times = [1e3 * value for value in (result.step_s.median, result.step_s.p25, result.step_s.p75)]
            cost = self._cost_s(result)
            metered = result.metered or {}
            lines.append(
                f"  {result.label:<{width}} {' '.join(f'{time:>8.2f}' for time in times)} {_ratio(self._ratio(result))}"
                f"  {_figure(cost, 1e3, 10)} {_ratio(self._cost_ratio(result))}"
                f"  {_figure(metered.get('total_ms'))} {_figure(metered.get('hidden_ms'))} "
                f"{_figure(metered.get('exposed_ms'))} {_figure(metered.get('sent_bytes'), 1e-6, 9)} "
                f"{_figure(result.samples_per_s, 1.0, 9)}"
            )
        return lines

    def as_json(self) -> list[dict[str, Any]]:
        """The entries of ``results``."""
        return [
            {
                "strategy": result.label,
                "status": result.status,
                "reason": result.reason,
                "step_ms": None if result.step_s is None else result.step_s.scaled(1e3).as_json(),
                "rank_median_step_ms": [1e3 * value for value in result.rank_medians_s],
                "ratio": self._ratio(result),
                "communication_cost_ms": _scaled(self._cost_s(result), 1e3),
                "communication_cost_ratio": self._cost_ratio(result),
                "metered": result.metered,
                "samples_per_s": result.samples_per_s,
            }
            for result in self._results
        ]

    def _median_of(self, label: str) -> float | None:
        return next((r.step_s.median for r in self._results if r.label == label and r.step_s is not None), None)

    def _ratio(self, result: StrategyResult) -> float | None:
        if result.step_s is None or self._baseline_s is None:
            return None
        return result.step_s.median / self._baseline_s

    def _cost_s(self, result: StrategyResult) -> float | None:
        """The step's time beyond that of the same step without communication."""
        if result.step_s is None or self._silent_s is None or result.label == NO_COMMUNICATION:
            return None
        return result.step_s.median - self._silent_s

    def _cost_ratio(self, result: StrategyResult) -> float | None:
        """Only where the baseline's cost is above 0: there is no ratio to noise."""
        cost = self._cost_s(result)
        if cost is None or self._baseline_s is None or self._silent_s is None or self._baseline_s <= self._silent_s:
            return None
        return cost / (self._baseline_s - self._silent_s)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


def _figure(value: float | None, factor: float = 1.0, width: int = 8) -> str:
    return f"{'-' if value is None else format(factor * value, '.2f'):>{width}}"


def _ratio(value: float | None) -> str:
    return f"{'-' if value is None else format(value, '.2f'):>6}"
