"""The background thread: it samples, it ends, and its failures arrive."""

from __future__ import annotations

import threading
from itertools import count

import pytest

from lightning_multigpu.callbacks.device_utilization import BackgroundSampler, Sample

NEVER_S = 3600.0


def test_samples_come_in_order_from_a_thread_that_ends() -> None:
    before, reached, numbers = set(threading.enumerate()), threading.Semaphore(0), count(1)

    def sample() -> Sample:
        reached.release()
        return {"number": float(next(numbers))}

    sampler = BackgroundSampler(sample, interval_s=1e-3)
    sampler.start()
    for _ in range(3):
        assert reached.acquire(timeout=30)
    sampler.stop()
    sampler.stop()
    assert set(threading.enumerate()) == before
    assert sampler.take() == [{"number": float(number)} for number in range(1, next(numbers))]
    assert sampler.take() == []


def test_the_first_sample_can_be_taken_at_once_but_only_the_first() -> None:
    numbers = count(1)
    idle = BackgroundSampler(lambda: {"number": float(next(numbers))}, interval_s=NEVER_S)
    assert idle.take() == []
    assert idle.take(first_now=True) == [{"number": 1.0}]
    assert idle.take(first_now=True) == []
    assert next(numbers) == 2


def test_a_failure_arrives_once_and_ends_sampling() -> None:
    def fail() -> Sample:
        raise OSError("sensor gone")

    sampler = BackgroundSampler(fail, interval_s=NEVER_S)
    sampler.start()
    with pytest.raises(OSError, match="sensor gone"):
        sampler.take(first_now=True)
    sampler._thread.join(30)
    assert not sampler._thread.is_alive()
    assert sampler.take() == []


def test_a_sensor_that_hangs_does_not_hang_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_multigpu.callbacks.device_utilization._STOP_TIMEOUT_S", 0.01)
    hanging, released = threading.Event(), threading.Event()

    def hang() -> Sample:
        hanging.set()
        assert released.wait(30)
        return {}

    sampler = BackgroundSampler(hang, interval_s=1e-3)
    sampler.start()
    assert hanging.wait(30)
    sampler.stop()
    assert sampler._thread.is_alive()
    released.set()
    sampler._thread.join(30)
