"""Connections of a job let its members in, and nobody else."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import queue
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from benchmarks.guardian_fuzz import resident_kb
from lightning_multigpu.communication import channel as channel_module
from lightning_multigpu.communication.channel import Channel, ChannelError, Listener, connect
from lightning_multigpu.emulation import EmulatedHosts
from tests.hosts import require_hosts

T = TypeVar("T")

SECRET, OTHER = bytes(32), bytes([1] * 32)
HOST = "127.0.0.1"


class Members(queue.SimpleQueue[Channel]):
    """The channels of those who were let in."""

    def next(self) -> Channel:
        return self.get(timeout=30)


@contextlib.contextmanager
def pair() -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a connection: that which has connected, and the member's."""
    with listening() as (port, members), contextlib.ExitStack() as ends:
        ours = ends.enter_context(contextlib.closing(connect(HOST, port, SECRET, timeout_s=10)))
        yield ours, ends.enter_context(contextlib.closing(members.next()))


@contextlib.contextmanager
def listening() -> Iterator[tuple[int, Members]]:
    members = Members()
    listener = Listener(HOST, 0, SECRET, members.put)
    try:
        yield listener.port, members
    finally:
        listener.close()
        while not members.empty():
            members.get().close()


def test_frames_arrive_as_they_were_sent() -> None:
    """With more parts than the kernel takes at once, and more bytes than fit into its buffers."""
    parts = [os.urandom(size) for size in [0, 1, 7, *[3] * 2000, 20_000_000]]
    with pair() as (ours, theirs):
        fields = {"kind": "push", "text": "ü" * 100_000, "values": [None, 1.5, float("inf")]}
        sending = threading.Thread(target=lambda: [ours.send(fields, list(map(memoryview, parts))), ours.send({})])
        sending.start()
        found, size_bytes = theirs.receive()
        assert found == fields
        assert size_bytes == sum(map(len, parts))
        rooms = [bytearray(len(part)) for part in parts]
        theirs.receive_into(map(memoryview, rooms))
        assert rooms == parts
        assert theirs.receive() == ({}, 0)
        sending.join()
        ours.shut_down()
        with pytest.raises(ChannelError, match="the other end has closed the connection"):
            theirs.receive()


def test_both_ends_must_know_the_secret() -> None:
    with listening() as (port, members):
        with pytest.raises(ChannelError, match=rf"{HOST} port {port} has not let this process in"):
            connect(HOST, port, OTHER, timeout_s=10)
        assert members.empty()

    def pretend(server: socket.socket) -> None:
        sock, _ = server.accept()
        with sock:
            sock.sendall(bytes(32))
            sock.recv(64)
            sock.sendall(bytes(32))

    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=pretend, args=(server,), daemon=True).start()
        with pytest.raises(ChannelError, match=rf"{HOST} port {port} does not know the secret of this job"):
            connect(HOST, port, SECRET, timeout_s=10)
    with pytest.raises(ChannelError, match=f"no connection to {HOST} port {port}"):
        connect(HOST, port, SECRET, timeout_s=0.5)


def in_namespace(namespace: str, work: Callable[[], T]) -> T:
    """The result of work on a thread in a network namespace; its sockets stay there."""

    def enter_and_work() -> T:
        with open(f"/run/netns/{namespace}", "rb") as opened:
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
    members = Members()
    with EmulatedHosts(3) as hosts, contextlib.ExitStack() as ends:
        channels = []
        for host in (hosts[0], hosts[0], hosts[2], hosts[2]):
            listen = functools.partial(Listener, host.address, 0, SECRET, members.put)
            listener = ends.enter_context(contextlib.closing(in_namespace(host.namespace, listen)))
            reach = functools.partial(connect, host.address, listener.port, SECRET, timeout_s=10)
            channels.append(ends.enter_context(contextlib.closing(in_namespace(hosts[1].namespace, reach))))
            ends.enter_context(contextlib.closing(members.next()))
        idle, busy, full, quiet = channels
        for channel in (idle, busy, full):
            channel.watch(1.0)
        quiet._limit_s = 1.0  # and no probes, to which the other machine would answer

        def fill() -> None:
            with contextlib.suppress(ChannelError):
                full.send({}, [memoryview(bytes(2**24))])

        threading.Thread(target=fill, daemon=True).start()
        switch = hosts[0].namespace.replace("host0", "switch")
        subprocess.run(["ip", "-n", switch, "link", "set", "port0", "nomaster"], check=True)  # nobody is told
        busy.send({"kind": "step"})
        with ThreadPoolExecutor(4) as pool:
            heard = {channel: pool.submit(channel.receive) for channel in channels}
            deadline_s = time.monotonic() + 30
            while not (heard[idle].done() and heard[busy].done()) and time.monotonic() < deadline_s:
                time.sleep(0.1)
                for channel in channels:
                    channel.end_if_silent()
            ended = [channel for channel in channels if heard[channel].done()]
            for channel in channels:
                channel.shut_down()
        assert ended == [idle, busy]
        for channel in ended:
            assert isinstance(heard[channel].exception(), ChannelError)


def test_the_buffer_of_a_slow_link_is_small() -> None:
    payload = memoryview(bytes(1_000_000))
    with pair() as (ours, theirs):

        def read_slowly() -> None:
            for _ in range(2):
                _, left = theirs.receive()
                while left:
                    time.sleep(0.002)  # 50 kB in 2 ms are 25 MB/s
                    room = bytearray(min(left, 50_000))
                    theirs.receive_into([memoryview(room)])
                    left -= len(room)

        reading = threading.Thread(target=read_slowly)
        reading.start()
        before = ours._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        for _ in range(2):
            ours.send({}, [payload])
        reading.join()
        assert ours._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before // 4


def test_what_was_proved_on_one_connection_proves_nothing_on_another() -> None:
    with listening() as (port, members), socket.create_connection((HOST, port), timeout=10) as first:
        asked = first.recv(32)
        with socket.create_connection((HOST, port), timeout=10) as second:
            assert second.recv(32) != asked
            member = connect(HOST, port, SECRET, timeout_s=10)
            members.next().close()
            second.sendall(bytes(64))
            assert second.recv(32) == b"refused".ljust(32)
            assert second.recv(32) == b"", "it is closed"
            member.close()


def test_strangers_have_no_threads_of_their_own() -> None:
    """Each had one. 200 strangers a second made a training step of two ranks 1.6 to 1.9 times as long."""
    with listening() as (port, _), contextlib.ExitStack() as strangers:
        before = threading.active_count()
        for _ in range(20):
            sock = strangers.enter_context(socket.create_connection((HOST, port), timeout=10))
            assert len(sock.recv(32)) == 32, "the listener has met it"
        assert threading.active_count() == before


def test_a_stranger_that_sends_a_byte_now_and_then_has_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time began anew with each byte, so that 64 bytes could take 640 s."""
    monkeypatch.setattr(channel_module, "_PATIENCE_S", 0.2)
    with listening() as (port, _), socket.create_connection((HOST, port), timeout=10) as sock:
        assert len(sock.recv(32)) == 32
        sock.settimeout(0.05)
        for _ in range(63):
            try:
                sock.sendall(b"x")
                if not sock.recv(1):
                    return
            except TimeoutError:
                continue
            except ConnectionError:
                return
        pytest.fail("it is still there")


def test_silent_strangers_keep_no_member_out() -> None:
    with listening() as (port, members), contextlib.ExitStack() as strangers:
        for _ in range(300):
            strangers.enter_context(socket.create_connection((HOST, port), timeout=10))
        with contextlib.closing(connect(HOST, port, SECRET, timeout_s=5)) as ours:
            ours.send({"kind": "hello"})
            theirs = members.next()
            assert theirs.receive() == ({"kind": "hello"}, 0)
            theirs.close()


def test_a_member_that_strangers_push_out_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers came between the two proofs of a member, the oldest had to leave, and the job ended."""
    draw, floods = os.urandom, [100, 100]
    with listening() as (port, members), contextlib.ExitStack() as strangers:

        def draw_among_strangers(number: int) -> bytes:
            if threading.current_thread() is threading.main_thread() and floods:
                for _ in range(floods.pop()):
                    sock = strangers.enter_context(socket.create_connection((HOST, port), timeout=10))
                    assert len(sock.recv(32)) == 32, "the listener has met it"
            return draw(number)

        monkeypatch.setattr(os, "urandom", draw_among_strangers)
        with contextlib.closing(connect(HOST, port, SECRET, timeout_s=30)), contextlib.closing(members.next()):
            assert not floods
            assert members.empty()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (struct.pack("!IQ", 1 << 31, 0), "announces 2147483648 bytes of fields"),
        (struct.pack("!IQ", 2, 1 << 63) + b"{}", "9223372036854775808 of payload"),
        (struct.pack("!IQ", 2, 0) + b"[]", "fields are no JSON object"),
        (struct.pack("!IQ", 60_000, 0) + b"[" * 60_000, "fields are no JSON object"),
        (struct.pack("!IQ", 3, 0) + b"\xff{}", "fields are no JSON object"),
        (struct.pack("!IQ", 60_000_000, 0) + b"{", "the other end has closed the connection"),
    ],
)  # fmt: skip
def test_what_is_no_frame_is_refused_before_memory_is_taken(data: bytes, words: str) -> None:
    with pair() as (ours, theirs):
        before_kb = resident_kb(os.getpid())
        ours._socket.sendall(data)
        ours._socket.shutdown(socket.SHUT_WR)
        with pytest.raises(ChannelError, match=words):
            theirs.receive()
        assert resident_kb(os.getpid()) - before_kb < 20_000
        with contextlib.suppress(ChannelError):
            theirs.send({"answer": json.loads("1")})
