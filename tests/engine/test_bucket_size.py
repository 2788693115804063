"""The bucket size that a measurement recommends."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import Tensor

from lightning_multigpu.engine.data_parallel.bucket_size import (
    SMALLEST_BYTES,
    TransferCost,
    best_bucket_bytes,
    fitted,
    measure,
)


@pytest.mark.parametrize("latency_s", [20e-6, 300e-6])
@pytest.mark.parametrize("s_per_byte", [1e-10, 8.5e-9])
def test_no_other_size_takes_less(latency_s: float, s_per_byte: float) -> None:
    cost = TransferCost(latency_s, s_per_byte)
    total = 25 << 20

    def unhidden_s(size: float) -> float:
        return total / size * cost.seconds(0) + total * s_per_byte + cost.seconds(round(size))

    best = best_bucket_bytes(cost, total)
    assert SMALLEST_BYTES < best < total
    assert all(unhidden_s(best) <= unhidden_s(best * factor) for factor in (0.5, 0.8, 1.25, 2))


def test_limits() -> None:
    assert best_bucket_bytes(TransferCost(1.0, 1e-9), 1 << 20) == 1 << 20, "no more than there is"
    assert best_bucket_bytes(TransferCost(0.0, 1e-9), 1 << 20) == SMALLEST_BYTES
    assert best_bucket_bytes(TransferCost(1e-3, 0.0), 1 << 20) == 1 << 20
    assert best_bucket_bytes(TransferCost(1e-3, 1e-9), 100) == SMALLEST_BYTES


def test_line_through_measurements() -> None:
    cost = fitted([1000, 3000], [0.002, 0.004])
    assert cost.s_per_byte == pytest.approx(1e-6)
    assert cost.latency_s == pytest.approx(0.001)
    assert fitted([1000, 3000], [0.004, 0.002]) == TransferCost(0.004, 0.0), "noise gives no negative slope"


def test_what_is_measured_is_what_the_all_reduce_takes() -> None:
    calls: list[int] = []

    def all_reduce(tensor: Tensor) -> None:
        calls.append(tensor.numel())
        time.sleep(1e-3 + tensor.numel() * tensor.element_size() * 1e-8)

    cost = measure(all_reduce, torch.device("cpu"))
    # A sleep takes at least its time, and on a busy machine more.
    assert 0.5e-3 < cost.latency_s < 1
    assert 0.5e-8 < cost.s_per_byte < 1e-6
    assert math.isfinite(cost.seconds(10**9))
    assert calls[0] == 1, "the first call connects, and is not timed"
