"""The table of strategies and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lightning_multigpu.bench.strategies.contenders import NO_COMMUNICATION
from lightning_multigpu.bench.strategies.strategy_run import StrategyResult
from lightning_multigpu.report.schema import attributes
from lightning_multigpu.report.terminal import columns


class StrategiesTable:
    """Sets the results of a run against the one labelled ``baseline`` and against the step without communication."""

    def __init__(self, results: Sequence[StrategyResult], baseline: str) -> None:
        self._results = results
        self._baseline_s = self._median_of(baseline)
        self._silent_s = self._median_of(NO_COMMUNICATION)

    def lines(self) -> list[str]:
        """The table; times in ms, sizes in MB."""
        names = ["# strategy", "step", "25 %", "75 %", "ratio", "cost", "ratio", "metered", "hidden", "exposed", "sent"]
        units = ["#", "(ms)", "(ms)", "(ms)", "", "(ms)", "", "(ms)", "(ms)", "(ms)", "(MB)"]
        rows = [[*names, "samples"], [*units, "(1/s)"]]
        failures = []
        for result in self._results:
            if result.step_s is None:
                failures.append(f"  {result.label}  {result.status}: {result.reason}")
                continue
            step, metered = result.step_s.scaled(1e3), result.metered or {}
            figures = [
                *(step.median, step.p25, step.p75, self._ratio(result)),
                *(_scaled(self._cost_s(result), 1e3), self._cost_ratio(result)),
                *(metered.get(name) for name in ("total_ms", "hidden_ms", "exposed_ms")),
                *(_scaled(metered.get("sent_bytes"), 1e-6), result.samples_per_s),
            ]
            rows.append([f"  {result.label}", *("-" if each is None else f"{each:.2f}" for each in figures)])
        return [*columns(rows, "left", "right"), *failures]

    def as_json(self) -> list[dict[str, Any]]:
        """The entries of ``results``."""
        return [
            {
                "strategy": result.label,
                **attributes(result, "status", "reason"),
                "step_ms": result.step_s and asdict(result.step_s.scaled(1e3)),
                "rank_median_step_ms": [1e3 * value for value in result.rank_medians_s],
                "ratio": self._ratio(result),
                "communication_cost_ms": _scaled(self._cost_s(result), 1e3),
                "communication_cost_ratio": self._cost_ratio(result),
                **attributes(result, "metered", "samples_per_s"),
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
