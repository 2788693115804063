"""DeviceUtilizationMonitor in real fits: what it logs, and that its thread ends on every way out."""

import threading
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_multigpu.callbacks import DeviceUtilizationMonitor
from lightning_multigpu.callbacks import device_utilization as module
from lightning_multigpu.callbacks.device_utilization import Sampler
from tests.callbacks.training import RecordingLogger, Regression, batches, trainer

NEVER_S = 3600.0
UTILIZATION = "device/utilization_percent"


class FakeProbe:
    reads = 0
    fails = False

    def read(self) -> dict[str, float]:
        if self.fails:
            raise OSError("sensor gone")
        self.reads += 1
        return {UTILIZATION: 10.0 * self.reads, "device/power_watts": 100.0}


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> FakeProbe:
    made = FakeProbe()
    monkeypatch.setattr(module, "probes_of", lambda device: [made])
    return made


def sampling_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "device-sampler"]


def test_an_interval_has_the_mean_of_its_samples(tmp_path: Path, probe: FakeProbe) -> None:
    class Sampling(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert monitor._sampler is not None
            monitor._sampler.sample()
            return super().training_step(batch, batch_idx)

    logger = RecordingLogger()
    monitor = DeviceUtilizationMonitor(interval_s=NEVER_S)
    fit = trainer(tmp_path, callbacks=[monitor], logger=logger, log_every_n_steps=2)
    fit.fit(Sampling(), batches(16))
    assert logger.curve(UTILIZATION) == [(1, 15.0), (3, 35.0)]
    assert monitor.statistics()[UTILIZATION] == pytest.approx({"median": 25.0, "p95": 38.5, "mean": 25.0, "last": 40.0})


def test_a_fit_shorter_than_the_sampling_interval_has_one_sample_of_its_own(tmp_path: Path, probe: FakeProbe) -> None:
    monitor = DeviceUtilizationMonitor(interval_s=NEVER_S)
    for sample in (10.0, 20.0):
        logger = RecordingLogger()
        fit = trainer(tmp_path, callbacks=[monitor], logger=logger)
        fit.fit(Regression(), batches(16))
        assert logger.curve(UTILIZATION) == [(3, sample)]
        assert len(monitor.series[UTILIZATION]) == 1
        assert fit.callback_metrics["device/power_watts"].item() == 100.0


@pytest.mark.parametrize(
    ("hook", "error"),
    [
        ("training_step", RuntimeError("broken")),
        ("validation_step", KeyboardInterrupt()),
        ("on_train_start", KeyboardInterrupt()),
        ("on_train_end", RuntimeError("broken")),
    ],
    ids=str,
)
def test_the_thread_ends_when_training_fails(tmp_path: Path, probe: FakeProbe, hook: str, error: BaseException) -> None:
    model = Regression()

    def fail(*args: Any, **kwargs: Any) -> None:
        assert hook == "on_train_end" or sampling_threads()
        raise error

    setattr(model, hook, fail)
    fit = trainer(tmp_path, callbacks=[DeviceUtilizationMonitor()])
    with pytest.raises((RuntimeError, SystemExit)):
        fit.fit(model, batches(16), batches(8))
    assert sampling_threads() == []


def test_a_sensor_that_fails_does_not_fail_the_training(tmp_path: Path, probe: FakeProbe) -> None:
    probe.fails = True
    fit = trainer(tmp_path, callbacks=[DeviceUtilizationMonitor(interval_s=NEVER_S)])
    with pytest.warns(UserWarning, match="devices are not measured any longer: OSError: sensor gone"):
        fit.fit(Regression(), batches(16))
    assert fit.global_step == 4
    assert sampling_threads() == []
    assert UTILIZATION not in fit.callback_metrics


def test_the_sampling_interval_is_above_zero() -> None:
    with pytest.raises(ValueError, match=r"interval_s=-1: .* above 0 seconds"):
        DeviceUtilizationMonitor(interval_s=-1)


def test_a_sensor_that_hangs_does_not_hang_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STOP_TIMEOUT_S", 0.01)
    hanging, released = threading.Event(), threading.Event()

    def hang() -> dict[str, float]:
        hanging.set()
        assert released.wait(30)
        return {}

    sampler = Sampler(hang, interval_s=1e-3)
    sampler.start()
    assert hanging.wait(30)
    sampler.stop()
    [thread] = sampling_threads()
    released.set()
    thread.join(30)
