"""Rates and sizes in tc's notation."""

from __future__ import annotations

import pytest

from lightning_multigpu.emulation.quantities import bits_per_s, size_bytes


@pytest.mark.parametrize(
    ("rate", "expected"), [("1gbit", 10**9), ("200mbit", 2 * 10**8), ("2.5Gbit", 25 * 10**8), ("800 bit", 800)]
)
def test_rates_are_decimal(rate: str, expected: int) -> None:
    assert bits_per_s(rate) == expected


@pytest.mark.parametrize(("size", "expected"), [("512kb", 512 * 1024), ("1mb", 1024**2), ("1600b", 1600)])
def test_sizes_are_binary(size: str, expected: int) -> None:
    assert size_bytes(size) == expected


@pytest.mark.parametrize("rate", ["", "fast", "1", "0gbit", "-1gbit", "1gbps", "1 g bit"])
def test_a_rate_that_is_none_is_named_with_the_units_that_exist(rate: str) -> None:
    with pytest.raises(ValueError, match=r"bandwidth=.*kbit, mbit, gbit.*bandwidth='1gbit'"):
        bits_per_s(rate)


def test_a_number_is_no_size() -> None:
    with pytest.raises(ValueError, match="burst=512: expected a positive number and a unit"):
        size_bytes(512)  # type: ignore[arg-type]
