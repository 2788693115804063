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
    """Sets the results of a run against the one labelled ``baseline`` and against the step without communication.

    Where the steps of two rows have different numbers of samples, as those of a pipeline and of ``ddp``, the time of as
    many samples is compared.
    """

    def __init__(self, results: Sequence[StrategyResult], baseline: str) -> None:
        self._results = results
        rows = {result.label: result for result in results if result.step_s is not None}
        self._baseline, self._silent = rows.get(baseline), rows.get(NO_COMMUNICATION)

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
                *(self._cost_text(result), self._cost_ratio(result)),
                *(metered.get(name) for name in ("total_ms", "hidden_ms", "exposed_ms")),
                *(_scaled(metered.get("sent_bytes"), 1e-6), result.samples_per_s),
            ]
            rows.append([f"  {result.label}", *map(_text, figures)])
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
                "communication_cost_spread_ms": _scaled(self._cost_spread_s(result), 1e3),
                "communication_cost_ratio": self._cost_ratio(result),
                **attributes(result, "metered", "samples_per_s"),
            }
            for result in self._results
        ]

    def _ratio(self, result: StrategyResult) -> float | None:
        if result.step_s is None or self._baseline is None:
            return None
        return result.step_s.median / _same_samples_s(self._baseline, result)

    def _cost_s(self, result: StrategyResult) -> float | None:
        """The step's time beyond that of the same samples without communication; 0 where noise makes it shorter."""
        if result.step_s is None or self._silent is None or result is self._silent:
            return None
        return max(0.0, result.step_s.median - _same_samples_s(self._silent, result))

    def _cost_spread_s(self, result: StrategyResult) -> float | None:
        """Half of the distance of the quartiles, of both steps together."""
        if self._cost_s(result) is None:
            return None
        spreads = [each.step_s for each in (result, self._silent) if each is not None and each.step_s is not None]
        return sum(spread.p75 - spread.p25 for spread in spreads) / 2

    def _cost_text(self, result: StrategyResult) -> str:
        cost, spread = (_scaled(of(result), 1e3) for of in (self._cost_s, self._cost_spread_s))
        return f"0 +-{spread:.2f}" if cost == 0 else _text(cost)

    def _cost_ratio(self, result: StrategyResult) -> float | None:
        """Only where the baseline's cost is above 0: there is no ratio to noise."""
        cost, base = self._cost_s(result), self._baseline and self._cost_s(self._baseline)
        if cost is None or not base or self._baseline is None:
            return None
        return cost / base / _share(self._baseline, result)


def _share(of: StrategyResult, result: StrategyResult) -> float:
    """The samples of a step of ``result`` over those of ``of``; 1 if they are not known."""
    return result.samples / of.samples if of.samples and result.samples else 1.0


def _same_samples_s(of: StrategyResult, result: StrategyResult) -> float:
    """Seconds that ``of`` takes for the samples of a step of ``result``."""
    assert of.step_s is not None
    return of.step_s.median * _share(of, result)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


def _text(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.2f}"
