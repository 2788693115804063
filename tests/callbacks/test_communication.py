"""What is read from a meter: hand-made ones, whose clock the test moves, with exact numbers; and real fits."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_multigpu.callbacks import CommunicationMonitor
from lightning_multigpu.callbacks.communication import figures
from lightning_multigpu.callbacks.monitor import keys_of
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.metering.traffic import StepTraffic
from lightning_multigpu.planning.pipelines.timeline import NOTHING
from lightning_multigpu.strategies.run_view import RunView
from tests.callbacks.training import Regression, batches, trainer
from tests.world import World, rank


class Script:
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
            "communication/memory_bytes": 0.0,
            "communication/algbw_gb_per_sec": 0.01,
            "communication/busbw_gb_per_sec": 0.01,
        }
    )


def test_figures_of_all_reduces() -> None:
    script = Script()
    script.transfer("all_reduce", 0.0, 0.5, group="data", size=1_000_000_000, n=4)
    step = script.step(1.0)
    found = values(step)
    assert found["communication/algbw_gb_per_sec"] == pytest.approx(2.0)
    assert found["communication/busbw_gb_per_sec"] == pytest.approx(3.0), "of 4 ranks"
    assert found["communication/sent_bytes"] == 1_500_000_000
    assert figures(step)["communication/busbw_gb_per_sec"][1] == 0.5, "it weighs as the time that it was measured over"
    assert figures(step)["communication/sent_bytes"][1] == 1.0
    script.transfer("send", 1.0, 1.5, group="pipeline", size=100)
    script.transfer("all_reduce", 1.5, 1.5, group="data", size=100, n=1)
    assert values(script.step(2.0)) == {
        "communication/total_ms": 500.0,
        "communication/exposed_ms": 0.0,
        "communication/sent_bytes": 100.0,
        "communication/memory_bytes": 0.0,
    }, "one rank has nothing to reduce"
    script.transfer("all_reduce", 2.5, 2.5, group="data", size=100)
    found = values(script.step(3.0))
    assert found["communication/all_reduce_ms"] == 0.0
    assert "communication/algbw_gb_per_sec" not in found


def fake_trainer(meter: Meter | None, world_size: int = 2) -> Any:
    """All that the monitor asks a trainer for before it logs."""
    view = RunView(meter=meter, held_bytes=lambda: NOTHING)
    return SimpleNamespace(strategy=SimpleNamespace(run_view=lambda: view), world_size=world_size, global_step=0)


def sent(monitor: CommunicationMonitor) -> list[float]:
    return [*monitor.series["communication/sent_bytes"].values]


@pytest.fixture(autouse=True)
def first_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CommunicationMonitor, "warm_up", 0)


def test_every_step_is_read_once_and_only_those_of_this_fit() -> None:
    script = Script()
    script.transfer("send", 0.0, 0.1, group="pipeline", size=1)
    script.step(1.0)
    monitor = CommunicationMonitor(log=False)
    monitor.on_train_start(fake_trainer(script.meter), Regression())
    for size in (10, 20, 30):
        script.transfer("send", script.now_s, script.now_s + 0.1, group="pipeline", size=size)
        script.step(script.now_s + 1.0)
        if size > 10:  # as when the first step is finished late
            monitor.collect(fake_trainer(script.meter), Regression(), None)
    monitor.collect(fake_trainer(script.meter), Regression(), None)
    assert sent(monitor) == [10.0, 20.0, 30.0]


def test_transfers_under_way_are_not_lost_to_the_end_of_an_interval() -> None:
    script = Script()
    monitor = CommunicationMonitor(log=False)
    monitor.on_train_start(fake_trainer(script.meter), Regression())
    script.step(1.0)
    monitor.settle()
    late = script.meter.begin("send", group="pipeline", group_size=2, size_bytes=7)
    script.step(2.0)
    monitor.settle()
    assert sent(monitor) == [0.0]
    late.finish()
    script.step(3.0)
    monitor.settle()
    monitor.collect(fake_trainer(script.meter), Regression(), None)
    assert sent(monitor) == [0.0, 7.0, 0.0]


def test_a_strategy_without_a_meter_is_named_once() -> None:
    monitor = CommunicationMonitor()
    with pytest.warns(UserWarning, match="communication is not measured: SimpleNamespace has no meter") as caught:
        monitor.on_train_start(fake_trainer(None), Regression())
    assert len(caught) == 1
    monitor.collect(fake_trainer(None), Regression(), None)
    monitor.finish()
    assert monitor.statistics() == {}


def test_two_ranks_log_the_same_figures_by_one_collective_an_interval(world2: World, tmp_path: Path) -> None:
    def train(log: bool) -> tuple[dict[str, float], list[float], list[int]]:
        monitor = CommunicationMonitor(log=log)
        fit = trainer(tmp_path, callbacks=[monitor], strategy="ring_ddp", devices=2, log_every_n_steps=4)
        fit.fit(Regression(), batches(96))
        steps = fit.strategy.meter.steps  # type: ignore[attr-defined]
        counts = [sum(totals.count for totals in step.operations if totals.group != "control") for step in steps]
        return {key: value.item() for key, value in fit.callback_metrics.items()}, sent(monitor), counts

    (first, sent_first, logging), (second, _, _) = world2.run(train, True)
    assert first == second
    assert set(first) == {key for key in keys_of("communication") if not key.startswith("parameter_server")}
    assert 0 < first["communication/exposed_ms"] <= first["communication/total_ms"]
    assert 0 < first["communication/all_reduce_ms"] <= first["communication/total_ms"]
    # One rank's share of the gradients (4 float32), and of the agreement on the next batch and on the end of training
    # (a row of 64 bytes a rank).
    assert len(sent_first) == 11, "the first step is left out"
    assert 4 * 4 + 2 * 64 in sent_first
    (nothing, _, silent), _ = world2.run(train, False)
    assert nothing == {}
    extra = [mine - theirs for mine, theirs in zip(logging, silent, strict=True)]
    # What is sent after a step is the next step's; the collective after the last of the 12 steps is nobody's.
    assert extra == [0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]


def test_ranks_that_lack_a_figure_do_not_lower_it(world2: World, tmp_path: Path) -> None:
    def train() -> dict[str, float]:
        class OnlyRankOne(CommunicationMonitor):
            def observe(self, key: str, value: float, weight: float = 1.0) -> None:
                if rank() == 1:
                    super().observe(key, 8.0, weight)

        fit = trainer(tmp_path, callbacks=[OnlyRankOne()], strategy="ring_ddp", devices=2)
        fit.fit(Regression(), batches(16))
        return {key: value.item() for key, value in fit.callback_metrics.items()}

    first, second = world2.run(train)
    assert first == second
    assert first["communication/total_ms"] == 8.0
