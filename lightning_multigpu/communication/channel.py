"""Connections between two processes of a job that prove to each other that they know its secret, and then move tensors.

::

    listening                                  connecting
      nonce A (32 bytes)              ------>
                                      <------    nonce B (32 bytes), HMAC(secret, "connecting", A, B)
      HMAC(secret, "listening", A, B) ------>
      frames                          <----->    frames

A frame is a JSON object and a payload, each of bounded length. Nothing is unpickled, and nothing is encrypted: torch's
own transports encrypt nothing either, so that a job across hosts belongs on a network of its own.

A process that has not proved that it knows the secret is a stranger. A stranger sends :data:`_HELLO_BYTES` bytes at
most, within :data:`_PATIENCE_S` seconds. If there are too many strangers, the oldest connection is dropped, so that
they keep no member out; a dropped member connects again. A stranger with a wrong proof is refused, and does not.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NONCE_BYTES = _PROOF_BYTES = 32
_HELLO_BYTES = _NONCE_BYTES + _PROOF_BYTES
_REFUSAL = b"refused".ljust(_PROOF_BYTES)
_PATIENCE_S = 10.0
_TRY_S = 5.0
_MAX_STRANGERS = 64
_BACKLOG = 256
_PAUSE_S = 0.2
_SEND_BUFFER_BYTES = 64 * 1024, 256 * 1024
_AHEAD_S = 0.0005
_LENGTHS = struct.Struct("!IQ")
_MAX_FIELDS_BYTES = 64 * 2**20
_MAX_PAYLOAD_BYTES = 2**40
_BUFFERS_AT_ONCE = 512  # the kernel takes 1,024
_NUM_PROBES = 3
_TCP_INFO = struct.Struct("2xB53xI")  # linux/tcp.h, struct tcp_info: tcpi_retransmits and tcpi_last_ack_recv


class ChannelError(ConnectionError):
    """The other end cannot be reached or trusted, has left, or has sent something other than a frame."""


class Channel:
    """A connection whose other end has proved that it belongs to the job. One thread may send while another receives.

    Args:
        sock: connected; the proofs have been exchanged.

    Attributes:
        bytes_in: bytes received in frames.
        bytes_out: bytes sent in frames.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES[1])
        self._socket, self._buffer_bytes = sock, _SEND_BUFFER_BYTES[1]
        self._limit_s: float | None = None
        self.bytes_in = self.bytes_out = 0

    @property
    def is_within_host(self) -> bool:
        """Whether both ends have the same address, as on one host. Emulated hosts have different ones."""
        try:
            return bool(self._socket.getsockname()[0] == self._socket.getpeername()[0])
        except (OSError, IndexError):  # it is broken, or has no addresses
            return False

    def watch(self, limit_s: float) -> None:
        """Lets the kernel, and :meth:`end_if_silent`, end the connection when the other machine is down.

        The kernels of both machines answer each other even while the processes are busy or stopped.

        Args:
            limit_s: how long the other machine may be silent, 1 or more.
        """
        self._limit_s = limit_s
        if self._socket.family != socket.AF_UNIX and hasattr(socket, "TCP_KEEPIDLE"):
            pause_s = max(1, round(limit_s / (1 + _NUM_PROBES)))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)

    def end_if_silent(self) -> None:
        """Ends the connection if sent data is repeated again and again without an answer.

        The kernel's probes (:meth:`watch`) find that a machine is down only while no data is under way to it. The
        kernel's limit for data under way (``TCP_USER_TIMEOUT``) would also end a connection whose other process does
        not read.
        """
        if self._limit_s is None or not hasattr(socket, "TCP_INFO"):
            return
        with contextlib.suppress(OSError):  # it has ended already
            found = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            num_sent_again, last_answer_ms = _TCP_INFO.unpack(found)
            if num_sent_again and last_answer_ms > 1e3 * self._limit_s:
                self.shut_down()

    def send(self, fields: Mapping[str, Any], payload: Sequence[memoryview] = ()) -> None:
        """Sends one frame; returns when the kernel has copied it, so that the payload may change.

        Args:
            fields: JSON values.
            payload: bytes, which are not copied in this process.

        Raises:
            ChannelError: the connection has ended.
        """
        text = json.dumps(fields, separators=(",", ":")).encode()
        lengths = _LENGTHS.pack(len(text), sum(part.nbytes for part in payload))
        start_s = time.perf_counter()
        try:
            sent_bytes = _send_all(self._socket, [memoryview(lengths + text), *payload])
            self._fit_buffer(sent_bytes, time.perf_counter() - start_s)
        except OSError as error:
            raise ChannelError(error.strerror or str(error)) from error
        self.bytes_out += sent_bytes

    def _fit_buffer(self, sent_bytes: int, elapsed_s: float) -> None:
        """Sets the kernel's buffer to 0.5 ms of data at the rate of a large frame, within limits.

        Urgent frames cannot overtake data in that buffer, nor in the network's queue, which is as long as the buffer
        allows. With 64 KiB alone, loopback carried 0.7 of what Gloo's connections carry.
        """
        if sent_bytes < 2 * _SEND_BUFFER_BYTES[1] or self._socket.family == socket.AF_UNIX:
            return
        least, most = _SEND_BUFFER_BYTES
        wanted = min(max(int(sent_bytes / elapsed_s * _AHEAD_S), least), most)
        if not 0.5 < wanted / self._buffer_bytes < 2:
            self._buffer_bytes = wanted
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wanted)

    def receive(self) -> tuple[dict[str, Any], int]:
        """The fields of the next frame, and the length of its payload, which :meth:`receive_into` receives.

        Raises:
            ChannelError: the connection has ended, or the other end sends something other than a frame.
        """
        fields_bytes, payload_bytes = _LENGTHS.unpack(self._receive_bytes(_LENGTHS.size))
        if fields_bytes > _MAX_FIELDS_BYTES or payload_bytes > _MAX_PAYLOAD_BYTES:
            raise ChannelError(
                f"a frame announces {fields_bytes} bytes of fields and {payload_bytes} of payload; "
                f"{_MAX_FIELDS_BYTES} and {_MAX_PAYLOAD_BYTES} are the limits"
            )
        try:
            fields = json.loads(self._receive_bytes(fields_bytes))
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise ChannelError("a frame came whose fields are no JSON object")
        return fields, payload_bytes

    def receive_into(self, buffers: Iterable[memoryview]) -> None:
        """Receives a payload into writable bytes, which together have its length.

        Raises:
            ChannelError: the connection has ended.
        """
        try:
            self.bytes_in += _receive_all(self._socket, buffers)
        except OSError as error:
            raise ChannelError(error.strerror or str(error)) from error

    def shut_down(self) -> None:
        """Ends the connection for both ends, and for threads that wait for it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Releases the socket; no thread may use it any more."""
        self._socket.close()

    def _receive_bytes(self, number: int) -> bytearray:
        """Allocates memory as the bytes arrive: the announced length may be wrong."""
        received = bytearray()
        while len(received) < number:
            part = bytearray(min(number - len(received), 2**20))
            self.receive_into([memoryview(part)])
            received += part
        return received


def connect(
    host: str, port: int, secret: bytes, *, timeout_s: float, before_retry: Callable[[], None] = lambda: None
) -> Channel:
    """Connects to a :class:`Listener` of the job; tries again if it does not listen yet, or drops the connection.

    Args:
        host: the listener's host.
        port: the listener's port.
        secret: the job's secret.
        timeout_s: seconds for all tries.
        before_retry: called after each try but the last, every 5 s or more often; what it raises ends the search.

    Raises:
        ChannelError: no process answers there in time, or the process that answers does not know the secret.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=min(_TRY_S, timeout_s))
        except OSError as error:
            problem, cause = f"no connection to {host} port {port}: {error.strerror or error}", error
            may_retry = isinstance(error, ConnectionRefusedError | TimeoutError)
        else:
            try:
                if not _is_accepted(sock, secret):
                    raise ChannelError(f"{host} port {port} does not know the secret of this job")
                return Channel(sock)
            except OSError as error:
                sock.close()
                if isinstance(error, ChannelError):
                    raise
                why = error.strerror or str(error)
                problem = f"{host} port {port} has not let this process in ({why}): is it a server of this job?"
                # A listener with many strangers drops the oldest connection, which may be a member's.
                cause, may_retry = error, not isinstance(error, TimeoutError | PermissionError)
        left_s = deadline_s - time.monotonic()
        if not may_retry or left_s <= 0:
            raise ChannelError(problem) from cause
        before_retry()
        time.sleep(min(_PAUSE_S, left_s))


def _is_accepted(sock: socket.socket, secret: bytes) -> bool:
    """Exchanges proofs with a listener; False if the listener's is wrong.

    Raises:
        PermissionError: the listener has refused this process's proof.
        OSError: the connection has ended before.
    """
    sock.settimeout(_PATIENCE_S)
    theirs, ours = _take(sock, _NONCE_BYTES), os.urandom(_NONCE_BYTES)
    sock.sendall(ours + _proof(secret, "connecting", theirs, ours))
    answer = _take(sock, _PROOF_BYTES)
    if answer == _REFUSAL:
        raise PermissionError("it has another secret")
    return hmac.compare_digest(answer, _proof(secret, "listening", theirs, ours))


@dataclass(frozen=True)
class _Stranger:
    sock: socket.socket
    meeting: Iterator[None]
    until_s: float


class Listener:
    """Accepts the members of a job at an address.

    One thread meets all strangers.

    Args:
        host: the only address to listen at.
        port: 0 for a free one.
        secret: the job's secret.
        welcome: called with the channel of each member, in a thread for that member.

    Raises:
        OSError: the address is not this host's, or the port is taken.
    """

    def __init__(self, host: str, port: int, secret: bytes, welcome: Callable[[Channel], None]) -> None:
        self._secret, self._welcome = secret, welcome
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._socket.setblocking(False)
        self._strangers: dict[int, _Stranger] = {}  # by descriptor, the oldest first
        self._poll = select.poll()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that it listens at."""
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Accepts no further connections, and closes those of strangers; members stay."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, on Linux
        self._thread.join()

    def _run(self) -> None:
        self._poll.register(self._socket, select.POLLIN)
        while not self._is_closed:
            oldest = next(iter(self._strangers.values()), None)
            left_ms = 1e3 if oldest is None else 1e3 * (oldest.until_s - time.monotonic())
            if left_ms <= 0:
                self._drop_oldest()
                continue
            for descriptor, _ in self._poll.poll(left_ms):
                if descriptor == self._socket.fileno():
                    self._accept()
                elif descriptor in self._strangers:
                    self._go_on(descriptor)
        while self._strangers:
            self._drop_oldest()
        self._socket.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError:
            if not self._is_closed:
                time.sleep(0.02)  # no descriptor is left, or the other end has disconnected
            return
        if len(self._strangers) == _MAX_STRANGERS:
            self._drop_oldest()
        sock.setblocking(False)
        self._poll.register(sock, select.POLLIN)
        self._strangers[sock.fileno()] = _Stranger(sock, self._meet(sock), time.monotonic() + _PATIENCE_S)
        self._go_on(sock.fileno())

    def _go_on(self, descriptor: int) -> None:
        try:
            next(self._strangers[descriptor].meeting)
        except StopIteration:  # it is a member
            self._forget(descriptor)
        except (OSError, RuntimeError):  # or no thread is left
            self._forget(descriptor).close()

    def _meet(self, sock: socket.socket) -> Iterator[None]:
        """Exchanges proofs; yields where the stranger has to send first."""
        ours, hello = os.urandom(_NONCE_BYTES), b""
        sock.send(ours)
        while len(hello) < _HELLO_BYTES:
            yield
            part = sock.recv(_HELLO_BYTES - len(hello))
            if not part:
                raise ConnectionError("it has closed the connection")
            hello += part
        theirs, proof = hello[:_NONCE_BYTES], hello[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._secret, "connecting", ours, theirs)):
            sock.send(_REFUSAL)
            raise ConnectionError("it does not know the secret")
        sock.send(_proof(self._secret, "listening", ours, theirs))
        threading.Thread(target=self._welcome, args=(Channel(sock),), name="member", daemon=True).start()

    def _drop_oldest(self) -> None:
        self._forget(next(iter(self._strangers))).close()

    def _forget(self, descriptor: int) -> socket.socket:
        self._poll.unregister(descriptor)
        return self._strangers.pop(descriptor).sock


def _proof(secret: bytes, role: str, asked: bytes, asking: bytes) -> bytes:
    return hmac.digest(secret, role.encode() + asked + asking, "sha256")


def _take(sock: socket.socket, number: int) -> bytes:
    """Exactly ``number`` bytes."""
    taken = b""
    while len(taken) < number:
        part = sock.recv(number - len(taken))
        if not part:
            raise ConnectionError("it has closed the connection")
        taken += part
    return taken


def _send_all(sock: socket.socket, buffers: Iterable[memoryview]) -> int:
    left = deque(buffer.cast("B") for buffer in buffers if buffer.nbytes)
    total = sum(part.nbytes for part in left)
    while left:
        number = sock.sendmsg([left[i] for i in range(min(len(left), _BUFFERS_AT_ONCE))])
        _advance(left, number)
    return total


def _receive_all(sock: socket.socket, buffers: Iterable[memoryview]) -> int:
    left = deque(buffer.cast("B") for buffer in buffers if buffer.nbytes)
    total = sum(part.nbytes for part in left)
    while left:
        number = sock.recvmsg_into([left[i] for i in range(min(len(left), _BUFFERS_AT_ONCE))], 0, socket.MSG_WAITALL)[0]
        if number == 0:
            raise ChannelError("the other end has closed the connection")
        _advance(left, number)
    return total


def _advance(left: deque[memoryview], number: int) -> None:
    while left and number >= left[0].nbytes:
        number -= left.popleft().nbytes
    if number:
        left[0] = left[0][number:]
