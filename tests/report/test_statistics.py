"""Statistics of one rank and of a run: exact numbers."""

from __future__ import annotations

import math

import pytest

from lightning_multigpu.report.statistics import Series, aggregate, aggregate_ranks, quantile, weighted_mean


def series(*values: float, warm_up: int = 0, capacity: int = 1 << 16) -> Series:
    made = Series(warm_up=warm_up, capacity=capacity)
    for value in values:
        made.append(value)
    return made


def test_statistics_of_a_short_series() -> None:
    expected = {"median": 2.5, "p95": 3.85, "mean": 2.5, "last": 2.0}
    assert series(4.0, 1.0, 3.0, 2.0).statistics() == pytest.approx(expected)


def test_one_value_is_all_of_its_statistics() -> None:
    assert series(7.0).statistics() == {"median": 7.0, "p95": 7.0, "mean": 7.0, "last": 7.0}


def test_a_series_without_values_has_no_statistics() -> None:
    assert series().statistics() is None


def test_warm_up_is_left_out_as_soon_as_other_values_follow() -> None:
    assert series(100.0, warm_up=1).statistics() == {"median": 100.0, "p95": 100.0, "mean": 100.0, "last": 100.0}
    made = series(100.0, 1.0, 3.0, warm_up=1)
    assert made.statistics() == pytest.approx({"median": 2.0, "p95": 2.9, "mean": 2.0, "last": 3.0})
    assert len(made) == 3


def test_the_mean_of_a_rate_is_total_over_total() -> None:
    rate = Series()
    rate.append(10.0, weight=1.0)  # 10 samples in 1 s
    rate.append(2.0, weight=3.0)  # 6 samples in 3 s
    statistics = rate.statistics()
    assert statistics is not None
    assert statistics["mean"] == 4.0
    assert statistics["median"] == 6.0


@pytest.mark.parametrize("capacity", [2, 8, 9, 64])
def test_a_long_series_keeps_bounded_memory_and_an_exact_mean(capacity: int) -> None:
    values = [float(value) for value in range(1000)]
    made = series(*values, capacity=capacity)
    statistics = made.statistics()
    assert statistics is not None
    assert len(made._kept) <= capacity
    assert statistics["mean"] == pytest.approx(499.5)
    assert statistics["last"] == 999.0


def test_thinned_values_stay_evenly_spread() -> None:
    made = series(*(float(value) for value in range(1000)), capacity=8)
    assert list(made._kept) == [0.0, 128.0, 256.0, 384.0, 512.0, 640.0, 768.0, 896.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_without_a_meaning_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="left out, not recorded"):
        Series().append(value)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan])
def test_a_weight_is_above_zero(weight: float) -> None:
    with pytest.raises(ValueError, match="weight="):
        Series().append(1.0, weight=weight)


def test_quantiles_interpolate_between_neighbours() -> None:
    assert quantile([1.0, 2.0, 4.0], 0.0) == 1.0
    assert quantile([1.0, 2.0, 4.0], 0.25) == 1.5
    assert quantile([1.0, 2.0, 4.0], 1.0) == 4.0


def test_weighted_mean() -> None:
    assert weighted_mean([(1.0, 1.0), (4.0, 2.0)]) == 3.0


def test_aggregation() -> None:
    assert aggregate([1.0, 2.0, 6.0], "sum") == 9.0
    assert aggregate([1.0, 2.0, 6.0], "max") == 6.0
    assert aggregate([1.0, 2.0, 6.0], "mean") == 3.0


def test_ranks_without_a_figure_do_not_count() -> None:
    first = {"median": 1.0, "p95": 2.0, "mean": 3.0, "last": 4.0}
    second = {"median": 3.0, "p95": 4.0, "mean": 5.0, "last": 6.0}
    ranks = [{"a": first, "b": first}, {"b": second}]
    assert aggregate_ranks(ranks, {"b": "mean", "a": "sum", "c": "max"}) == {
        "b": {"median": 2.0, "p95": 3.0, "mean": 4.0, "last": 5.0},
        "a": first,
    }


@pytest.mark.parametrize("capacity", [8, 64])
def test_a_curve_has_the_medians_of_equal_stretches(capacity: int) -> None:
    made = Series(capacity=capacity)
    for moment in range(32):
        made.append(float(moment), at_s=10.0 * moment)
    found = made.curve(points=4)
    assert len(found) == 4
    stride = 1 if capacity == 64 else 4
    for stretch, (at_s, middle, largest) in enumerate(found):
        last = 8 * stretch + 8 - stride
        assert (at_s, largest, middle) == (10.0 * last, last, (8 * stretch + last) / 2)


def test_a_short_curve_has_all_values() -> None:
    assert series(3.0, 1.0).curve() == [(0.0, 3.0, 3.0), (0.0, 1.0, 1.0)]
    assert series().curve() == []
