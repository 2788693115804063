"""The background thread: it samples, it ends, and its failures arrive."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lightning_multigpu.callbacks.sampler import BackgroundSampler, Sample

NEVER_S = 3600.0


class Counter:
    """Numbers its samples; ``fails_at`` is the one that raises."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.count = 0
        self.reached = threading.Semaphore(0)
        self._fails_at = fails_at

    def __call__(self) -> Sample:
        self.count += 1
        self.reached.release()
        if self.count == self._fails_at:
            raise OSError("sensor gone")
        return {"number": float(self.count)}


@pytest.fixture
def counter() -> Counter:
    return Counter()


@pytest.fixture
def idle(counter: Counter) -> Iterator[BackgroundSampler]:
    """A sampler whose time does not come."""
    sampler = BackgroundSampler(counter, interval_s=NEVER_S)
    sampler.start()
    yield sampler
    sampler.stop()


def test_samples_come_from_a_thread_of_their_own_in_order(counter: Counter) -> None:
    sampler = BackgroundSampler(counter, interval_s=1e-3)
    sampler.start()
    for _ in range(3):
        assert counter.reached.acquire(timeout=30)
    sampler.stop()
    numbers = [sample["number"] for sample in sampler.take()]
    assert numbers == [float(number + 1) for number in range(counter.count)]
    assert sampler.take() == []


def test_a_stopped_sampler_has_no_thread_any_more(counter: Counter) -> None:
    before = set(threading.enumerate())
    sampler = BackgroundSampler(counter, interval_s=NEVER_S)
    sampler.start()
    sampler.stop()
    sampler.stop()
    assert set(threading.enumerate()) == before


def test_the_first_sample_can_be_taken_at_once_but_only_the_first(idle: BackgroundSampler, counter: Counter) -> None:
    assert idle.take() == []
    assert idle.take(first_now=True) == [{"number": 1.0}]
    assert idle.take(first_now=True) == []
    assert counter.count == 1


def test_a_failure_arrives_once_and_ends_sampling() -> None:
    counter = Counter(fails_at=1)
    sampler = BackgroundSampler(counter, interval_s=NEVER_S)
    sampler.start()
    with pytest.raises(OSError, match="sensor gone"):
        sampler.take(first_now=True)
    sampler.stop()
    assert sampler.take() == []


def test_a_sensor_that_hangs_does_not_hang_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_multigpu.callbacks.sampler._STOP_TIMEOUT_S", 0.01)
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
