"""The bandwidth below which a compression pays."""

from __future__ import annotations

import math

import pytest

from lightning_multigpu.planning.break_even import break_even_bytes_per_s, measured_cost_s_per_byte


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("ratio", [1.1, 2, 4])
@pytest.mark.parametrize("cost_s_per_byte", [1e-10, 1e-8])
def test_at_the_border_both_take_the_same_time(cost_s_per_byte: float, ratio: float, world_size: int) -> None:
    border = break_even_bytes_per_s(cost_s_per_byte, ratio, world_size=world_size)
    sent = 2 * (world_size - 1) / world_size

    def gain_s_per_byte(bandwidth: float) -> float:
        return sent / bandwidth - (sent / ratio / bandwidth + cost_s_per_byte)

    assert gain_s_per_byte(border) == pytest.approx(0, abs=1e-9 * cost_s_per_byte)
    assert gain_s_per_byte(border / 2) > 0 > gain_s_per_byte(border * 2)


def test_two_hosts_by_hand() -> None:
    """A quarter of 1 GB travels in place of all, for half a second of coding: at 1.5 GB/s 2/3 s = 1/6 s + 1/2 s."""
    assert break_even_bytes_per_s(0.5e-9, 4) == pytest.approx(1.5e9)


def test_what_saves_nothing_or_costs_nothing() -> None:
    assert break_even_bytes_per_s(1e-9, 1) == 0
    assert break_even_bytes_per_s(1e-9, 0.5) == 0
    assert break_even_bytes_per_s(0, 2) == math.inf
    assert break_even_bytes_per_s(0, 1) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cost_s_per_byte": -1, "ratio": 2}, "cost_s_per_byte=-1.*0 or more"),
        ({"cost_s_per_byte": math.nan, "ratio": 2}, "cost_s_per_byte=nan"),
        ({"cost_s_per_byte": 1, "ratio": 0}, "ratio=0.*more than 0"),
        ({"cost_s_per_byte": 1, "ratio": 2, "world_size": 1}, "world_size=1.*2 or more"),
    ],
)
def test_arguments_out_of_range_are_named(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        break_even_bytes_per_s(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("bandwidth", "cost_s_per_byte"), [(1e8, 2e-9), (1e9, 2e-9)])
def test_two_all_reduces_over_one_link_tell_the_cost(bandwidth: float, cost_s_per_byte: float) -> None:
    plain_s, compressed_s = 1e6 / bandwidth, 1e6 / 4 / bandwidth + 1e6 * cost_s_per_byte
    found = measured_cost_s_per_byte(plain_s, compressed_s, 4, 10**6)
    assert found == pytest.approx(cost_s_per_byte)
    assert (break_even_bytes_per_s(found, 4) > bandwidth) == (compressed_s < plain_s)


def test_a_cost_that_is_lost_in_noise() -> None:
    for compressed_s in (0.24, 0.25, 0.37):
        assert measured_cost_s_per_byte(1.0, compressed_s, 4, 1000) == 0
    assert measured_cost_s_per_byte(1.0, 0.38, 4, 1000) == pytest.approx(0.13e-3)
