"""Figures from a hand-made meter, whose clock the test moves: exact numbers."""

from __future__ import annotations

import pytest

from lightning_multigpu.callbacks.communication import figures
from lightning_multigpu.communication.meter import Meter, StepTraffic


class Script:
    """A meter and its clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.meter = Meter(clock=lambda: self.now_s)

    def transfer(self, operation: str, start_s: float, end_s: float, *, group: str, size: int, n: int = 2) -> None:
        self.now_s = start_s
        record = self.meter.begin(operation, group=group, group_size=n, size_bytes=size)
        self.now_s = end_s
        record.finish()

    def step(self, end_s: float) -> StepTraffic:
        self.now_s = end_s
        self.meter.end_step()
        return self.meter.steps[-1]


def values(step: StepTraffic) -> dict[str, float]:
    return {key: value for key, (value, _) in figures(step).items()}


def test_gradients_and_control_traffic_are_told_apart() -> None:
    script = Script()
    script.transfer("all_reduce", 0.0, 0.2, group="data", size=1_000_000)
    script.transfer("all_reduce", 0.1, 0.4, group="data", size=3_000_000)
    script.transfer("all_reduce", 0.5, 0.6, group="metrics", size=8)
    script.transfer("broadcast", 0.7, 0.9, group="data", size=100)
    script.meter.waited(0.3, 0.55)
    assert values(script.step(1.0)) == pytest.approx(
        {
            "communication/all_reduce_ms": 400.0,
            "communication/total_ms": 700.0,
            "communication/exposed_ms": 150.0,
            "communication/sent_bytes": 4_000_108.0,
            "communication/algbw_gb_per_sec": 0.01,
            "communication/busbw_gb_per_sec": 0.01,
        }
    )


def test_bus_bandwidth_takes_the_size_of_the_group_into_account() -> None:
    script = Script()
    script.transfer("all_reduce", 0.0, 0.5, group="data", size=1_000_000_000, n=4)
    found = values(script.step(1.0))
    assert found["communication/algbw_gb_per_sec"] == pytest.approx(2.0)
    assert found["communication/busbw_gb_per_sec"] == pytest.approx(3.0)
    assert found["communication/sent_bytes"] == 1_500_000_000


def test_a_step_without_an_all_reduce_has_no_all_reduce_figures() -> None:
    script = Script()
    script.transfer("send", 0.0, 0.5, group="pipeline", size=100)
    assert values(script.step(1.0)) == {
        "communication/total_ms": 500.0,
        "communication/exposed_ms": 0.0,
        "communication/sent_bytes": 100.0,
    }


def test_a_group_of_one_rank_has_nothing_to_reduce() -> None:
    script = Script()
    script.transfer("all_reduce", 0.0, 0.5, group="data", size=100, n=1)
    assert "communication/all_reduce_ms" not in values(script.step(1.0))


def test_an_all_reduce_that_took_no_time_has_no_bandwidth() -> None:
    script = Script()
    script.transfer("all_reduce", 0.5, 0.5, group="data", size=100)
    found = values(script.step(1.0))
    assert found["communication/all_reduce_ms"] == 0.0
    assert "communication/algbw_gb_per_sec" not in found


def test_bandwidths_weigh_as_much_as_the_time_they_were_measured_over() -> None:
    script = Script()
    script.transfer("all_reduce", 0.0, 0.5, group="data", size=100)
    found = figures(script.step(1.0))
    assert found["communication/busbw_gb_per_sec"][1] == 0.5
    assert found["communication/sent_bytes"][1] == 1.0
