"""Fixtures of the callbacks' tests."""

import pytest

from tests.callbacks.training import HandClock, hand_clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    return hand_clock(monkeypatch)
