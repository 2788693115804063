"""Rates and sizes in tc's notation."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_multigpu.emulation.quantities import bits_per_s, size_bytes


def test_rates_are_decimal_and_sizes_binary() -> None:
    assert [bits_per_s(rate) for rate in ("1gbit", "200mbit", "2.5Gbit", "800 bit")] == [
        10**9,
        2 * 10**8,
        25 * 10**8,
        800,
    ]
    assert [size_bytes(size) for size in ("512kb", "1mb", "1600b")] == [512 * 1024, 1024**2, 1600]


@pytest.mark.parametrize("rate", ["", "fast", "1", "0gbit", "-1gbit", "1gbps", "1 g bit", 512])
def test_a_rate_that_is_none_is_named_with_the_units_that_exist(rate: Any) -> None:
    with pytest.raises(ValueError, match=r"bandwidth=.*kbit, mbit, gbit.*bandwidth='1gbit'"):
        bits_per_s(rate)
