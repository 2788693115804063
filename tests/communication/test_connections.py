"""Connections that a failure cuts, and those of other threads that it leaves alone; over the loopback interface."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from lightning_multigpu.communication.connections import Connections

Connect = Callable[[], socket.socket]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def back_end(listener: socket.socket) -> Iterator[Connect]:
    """Connects as a back end does, in C; returns the other end."""
    with ExitStack() as stack:

        def connect() -> socket.socket:
            stack.callback(os.close, socket.create_connection(listener.getsockname()).detach())
            other = stack.enter_context(listener.accept()[0])
            other.settimeout(10)
            return other

        yield connect


def is_cut(other: socket.socket) -> bool:
    other.setblocking(False)
    try:
        return other.recv(1) == b""
    except BlockingIOError:
        return False


def test_what_a_back_end_has_opened_is_cut(back_end: Connect) -> None:
    connections = Connections()
    before = back_end()
    with connections.noted():
        noted = back_end()
        with connections.noted():
            within = back_end()
    after = back_end()
    assert connections.cut() == 2
    assert [is_cut(other) for other in (before, noted, within, after)] == [False, True, True, False]


@pytest.mark.parametrize("meanwhile", [True, False], ids=["while groups are made", "afterwards"])
def test_the_connection_of_a_logger_outlives_the_job(
    listener: socket.socket, back_end: Connect, meanwhile: bool
) -> None:
    """A thread of its own opened it while groups were being made; the logger could not say how the run had ended."""
    connections = Connections()
    with connections.noted():
        noted = back_end()
        logger = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        if meanwhile:
            assert connections.cut() == 1
    with logger, server:
        assert connections.cut() == 1
        logger.send(b"failed")
        assert server.recv(10) == b"failed"
        assert is_cut(noted)


def test_a_rank_without_a_descriptor_left_still_cuts(back_end: Connect) -> None:
    """To list its sockets took a descriptor, and so did each of them: the others waited until the rank was killed."""
    connections = Connections()
    with connections.noted():
        noted = back_end()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    filled = []
    highest = max(map(int, os.listdir("/proc/self/fd")))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, limit[1]))
        with suppress(OSError):
            while True:
                filled.append(os.dup(0))
        assert connections.cut() == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        for descriptor in filled:
            os.close(descriptor)
    assert is_cut(noted)
