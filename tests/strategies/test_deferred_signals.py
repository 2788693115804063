"""Signals that wait for all ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from lightning_multigpu.strategies.deferred_signals import DeferredSignals


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """What the handlers that were there before have been called with."""
    calls: list[int] = []
    before = {s: signal.signal(s, lambda signum, frame: calls.append(signum)) for s in (signal.SIGUSR1, signal.SIGUSR2)}
    yield calls
    for signum, handler in before.items():
        signal.signal(signum, handler)


def send(signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)


def test_a_signal_waits_until_it_is_due(handled: list[int]) -> None:
    signals = DeferredSignals([signal.SIGUSR1, signal.SIGUSR2])
    signals.hold()
    send(signal.SIGUSR2)
    assert (signals.received, handled) == (0b10, [])
    signals.act()
    assert handled == [], "no rank has agreed yet"
    signals.due = 0b11  # another rank has received the first one
    signals.act()
    assert handled == [signal.SIGUSR1, signal.SIGUSR2]
    assert (signals.received, signals.due) == (0, 0)
    signals.release()
    send(signal.SIGUSR1)
    assert handled[2:] == [signal.SIGUSR1], "the handler is back"


def test_what_was_received_and_not_acted_on_is_not_lost(handled: list[int]) -> None:
    signals = DeferredSignals([signal.SIGUSR1])
    signals.hold()
    send(signal.SIGUSR1)
    signals.release()
    assert handled == [signal.SIGUSR1]
