"""Signals that wait for all ranks."""

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_multigpu.job.run_signals import SAME_INTERRUPT_S, RunSignals


@pytest.fixture
def handled() -> Iterator[list[int]]:
    calls: list[int] = []
    before = {s: signal.signal(s, lambda signum, frame: calls.append(signum)) for s in (signal.SIGUSR1, signal.SIGUSR2)}
    yield calls
    for signum, handler in before.items():
        signal.signal(signum, handler)


@contextlib.contextmanager
def held(signals: list[signal.Signals], **options: Any) -> Iterator[RunSignals]:
    """They are held within the block; an interrupt that is acted on at its end is ignored."""
    deferring = RunSignals()
    deferring.defer(signals)
    vars(deferring).update(options)
    deferring.hold()
    try:
        yield deferring
    finally:
        with contextlib.suppress(KeyboardInterrupt):
            deferring.end(None)


def send(signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)


def test_a_signal_waits_until_it_is_due(handled: list[int]) -> None:
    with held([signal.SIGUSR1, signal.SIGUSR2]) as signals:
        send(signal.SIGUSR2)
        assert (signals.received, handled) == (0b10, [])
        signals.act()
        assert handled == [], "no rank has agreed yet"
        signals.agree(0b11, may_act=False)  # another rank has received the first one
        assert handled == [], "not in the middle of an accumulated gradient"
        signals.agree(0, may_act=True)
        assert handled == [signal.SIGUSR1, signal.SIGUSR2]
        assert signals.received == 0
    send(signal.SIGUSR1)
    assert handled[2:] == [signal.SIGUSR1], "the handler is back"


def test_what_was_received_and_not_acted_on_is_not_lost(handled: list[int]) -> None:
    with held([signal.SIGUSR1]):
        send(signal.SIGUSR1)
    assert handled == [signal.SIGUSR1]


def test_interrupts_are_counted_and_a_wrapper_sends_each_twice() -> None:
    told: list[int] = []
    with held([signal.SIGINT], on_signal=lambda signum, number: told.append(number)) as signals:
        send(signal.SIGINT)
        send(signal.SIGINT)
        assert (signals.received, told) == (1, [1])
        time.sleep(1.1 * SAME_INTERRUPT_S)
        send(signal.SIGINT)
        assert told == [1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_a_batch_to_agree_on_a_rank_acts_alone() -> None:
    with held([signal.SIGTERM, signal.SIGINT]) as signals:
        signals.training_ends(lambda received: [received])
        for signum, error in ((signal.SIGTERM, SIGTERMException), (signal.SIGINT, KeyboardInterrupt)):
            with pytest.raises(error):
                send(signum)
            assert not signals.agreed_on(error())


def test_a_rank_acts_alone_where_the_ranks_do_not_agree() -> None:
    with held([signal.SIGINT]) as signals:
        with pytest.raises(KeyboardInterrupt):
            signals.follow(signal.SIGINT)
        assert signals.received == 0


def test_a_forked_worker_ignores_what_its_rank_holds() -> None:
    with held([signal.SIGINT]) as signals:
        signals.training_ends(lambda received: [received])
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                send(signal.SIGINT)
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_signal_that_was_acted_on_is_not_handled_again_at_the_end(handled: list[int]) -> None:
    """The launcher of a rank that acts on SIGTERM sends it to its children, which have acted too."""
    with held([signal.SIGUSR1, signal.SIGUSR2]) as signals:
        signals.agree(0b01, may_act=True)
        time.sleep(1.1 * SAME_INTERRUPT_S)
        send(signal.SIGUSR1)
        send(signal.SIGUSR2)
    assert handled == [signal.SIGUSR1, signal.SIGUSR2]


def test_a_signal_to_a_main_thread_that_waits_in_c_code_is_told() -> None:
    """Its handler cannot run: SIGTERM had no effect on ranks that waited for each other."""
    c, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)  # zeros are a mutex of pthreads
    signals, told = RunSignals(), []

    def tell(status: int, number: int) -> None:
        told.append((status, number))
        if number:  # the guardian waits, and then tells a failure, which ends the wait
            signals.follow(signal.SIGTERM)
            c.pthread_mutex_unlock(mutex)

    signals.begin(None, tell)
    signals.hold(signal.SIGTERM)
    try:
        c.pthread_mutex_lock(mutex)
        threading.Timer(0.2, send, [signal.SIGTERM]).start()
        with pytest.raises(SIGTERMException):
            c.pthread_mutex_lock(mutex)
        assert told == [(143, 1), (143, 0)], "and that the rank acts"
    finally:
        signals.end(None)


def test_signals_of_forked_processes_are_not_counted() -> None:
    """The C handler of a loader's worker writes to the pipe of its rank: torch ends workers by SIGTERM."""
    told: list[int] = []
    signals = RunSignals()
    signals.begin(None, lambda status, number: told.append(number))
    signals.hold(signal.SIGTERM)
    try:
        for _ in range(2):
            if (pid := os.fork()) == 0:
                send(signal.SIGINT)
                time.sleep(0.1)
                os._exit(0)
            os.waitpid(pid, 0)
            time.sleep(1.1 * SAME_INTERRUPT_S)
        assert told == []
    finally:
        signals.end(None)
