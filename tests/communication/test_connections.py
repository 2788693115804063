"""Connections that a failure cuts, and those of other threads that it leaves alone; over the loopback interface."""

import ctypes
import functools
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import TypeVar

import pytest

from lightning_multigpu.communication import connections as connections_module
from lightning_multigpu.communication.connections import Connections
from lightning_multigpu.emulation import EmulatedHosts
from lightning_multigpu.emulation.namespaces import Namespace
from tests.hosts import require_hosts

T = TypeVar("T")
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


def is_cut(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


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


def test_a_descriptor_that_another_thread_has_taken_meanwhile(
    listener: socket.socket, back_end: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number went to a connection opened between the listing and the shutdown, which was cut."""
    connections = Connections()
    with connections.noted():
        other = back_end()
    noted, _ = sorted(
        (each for each, name in connections_module._sockets().items() if name in connections._names),
        key=lambda each: each == other.fileno(),
    )
    with socket.create_connection(listener.getsockname()) as logger, listener.accept()[0] as server:

        def take() -> list[socket.socket]:
            os.dup2(logger.fileno(), noted)
            return [other]

        monkeypatch.setattr(connections_module.gc, "get_objects", take)
        assert connections.cut() == 0
        assert not is_cut(server)


def in_namespace(namespace: Namespace, work: Callable[[], T]) -> T:
    """The result of work on a thread in a network namespace; its sockets stay there."""

    def enter_and_work() -> T:
        with open(f"/proc/{namespace.pid}/ns/net", "rb") as opened:
            assert ctypes.CDLL(None, use_errno=True).setns(opened.fileno(), 0x40000000) == 0
        return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(enter_and_work).result()


@pytest.mark.hosts
def test_a_machine_that_is_gone_is_noticed_and_a_process_that_does_not_read_is_not() -> None:
    """Of two connections to the lost host one is idle, and one has data on its way: the kernel's probes end the first.

    Of two connections to a host that is there one is full, since its other end does not read, and one has nothing to
    say.
    """
    require_hosts()
    connections = Connections()
    with EmulatedHosts(3) as hosts, ExitStack() as ends:
        opened = []
        for host in (hosts[0], hosts[0], hosts[2], hosts[2]):
            listen = functools.partial(socket.create_server, (host.address, 0))
            listener = ends.enter_context(in_namespace(host.namespace, listen))
            reach = functools.partial(socket.create_connection, listener.getsockname(), timeout=10)
            with connections.noted():
                opened.append(ends.enter_context(in_namespace(hosts[1].namespace, reach)))
            ends.enter_context(listener.accept()[0])
        idle, busy, full, quiet = opened
        full.setblocking(False)
        with suppress(BlockingIOError):
            while full.send(bytes(2**20)):
                pass
        time.sleep(1.5)  # longer than the limit, and nobody has probed yet
        connections.cut_silent(1.0)
        hosts.switch.run("ip", "link", "set", "port0", "nomaster")  # nobody is told
        busy.send(b"step")
        deadline_s = time.monotonic() + 30
        ended: list[socket.socket] = []
        while len(ended) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.1)
            connections.cut_silent(1.0)
            ended = [each for each in opened if is_cut(each)]
        time.sleep(2.5)  # the kernel asks the full one ever more seldom
        connections.cut_silent(1.0)
        assert [each for each in opened if is_cut(each)] == [idle, busy]
        assert not is_cut(quiet)
