"""Statistics of one rank and of a run: exact numbers."""

import math

import pytest

from lightning_multigpu.report.statistics import Series, Spread, aggregate, aggregate_ranks, quantile


def series(*values: float, warm_up: int = 0, capacity: int = 1 << 16) -> Series:
    made = Series(warm_up=warm_up, capacity=capacity)
    for value in values:
        made.append(value)
    return made


@pytest.mark.parametrize(
    ("values", "warm_up", "expected"),
    [
        ((4.0, 1.0, 3.0, 2.0), 0, (2.5, 3.85, 2.5, 2.0)),
        ((7.0,), 0, (7.0, 7.0, 7.0, 7.0)),
        ((100.0,), 1, (100.0, 100.0, 100.0, 100.0)),  # left out as soon as others follow
        ((100.0, 1.0, 3.0), 1, (2.0, 2.9, 2.0, 3.0)),
    ],
)
def test_statistics_of_a_short_series(values: tuple[float, ...], warm_up: int, expected: tuple[float, ...]) -> None:
    made = series(*values, warm_up=warm_up)
    assert made.statistics() == pytest.approx(dict(zip(("median", "p95", "mean", "last"), expected, strict=True)))
    assert len(made) == len(values)
    assert series().statistics() is None


def test_the_mean_of_a_rate_is_total_over_total() -> None:
    rate = Series()
    rate.append(10.0, weight=1.0)  # 10 samples in 1 s
    rate.append(2.0, weight=3.0)  # 6 samples in 3 s
    statistics = rate.statistics()
    assert statistics is not None
    assert statistics["mean"] == 4.0
    assert statistics["median"] == 6.0


def test_a_long_series_keeps_bounded_memory_and_an_exact_mean() -> None:
    made = series(*map(float, range(1000, 0, -1)), capacity=8)
    assert list(made.values) == [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert len(made) == 1000
    assert made.statistics() == pytest.approx({"median": 4.5, "p95": 7.65, "mean": 500.5, "last": 1.0})


@pytest.mark.parametrize(
    ("value", "weight"), [(math.nan, 1.0), (math.inf, 1.0), (-math.inf, 1.0), (1.0, 0.0), (1.0, -1.0), (1.0, math.nan)]
)
def test_a_value_or_weight_without_a_meaning_is_refused(value: float, weight: float) -> None:
    with pytest.raises(ValueError, match="left out, not recorded" if weight == 1.0 else "weight="):
        Series().append(value, weight=weight)


def test_quantiles_and_aggregation() -> None:
    assert [quantile([1.0, 2.0, 4.0], share) for share in (0.0, 0.25, 1.0)] == [1.0, 1.5, 4.0]
    assert [aggregate([1.0, 2.0, 6.0], how) for how in ("sum", "max", "mean")] == [9.0, 6.0, 3.0]


def test_spread() -> None:
    spread = Spread.of([5.0, 1.0, 2.0, 3.0, 4.0])
    assert spread == Spread(median=3.0, p25=2.0, p75=4.0, min=1.0, max=5.0, count=5)
    assert spread.scaled(10) == Spread(median=30, p25=20, p75=40, min=10, max=50, count=5)


def test_ranks_without_a_figure_do_not_count() -> None:
    first = {"median": 1.0, "p95": 2.0, "mean": 3.0, "last": 4.0}
    second = {"median": 3.0, "p95": 4.0, "mean": 5.0, "last": 6.0}
    ranks = [{"a": first, "b": first}, {"b": second}]
    assert aggregate_ranks(ranks, {"b": "mean", "a": "sum", "c": "max"}) == {
        "b": {"median": 2.0, "p95": 3.0, "mean": 4.0, "last": 5.0},
        "a": first,
    }
