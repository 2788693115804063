"""A worker and a parameter server: two TCP connections, one for messages and one for tensors.

A message is a pickled value. Tensors have a connection of their own: a message does not wait behind gradients that are
on their way. The ends of one host share memory for tensors, and only tell each other that a tensor is there::

    worker   .grad --copied--> [ out  ]               [ into ] --copied--> parameters
    ............................  |  ....................^..........................
    server                     [ into ] average, update [ out  ]

The connections are sockets and no process group, because a wait has to end with its connection. Gloo tells nobody of a
transfer that is under way when its connection ends (``Pair::signalException`` in gloo/transport/tcp/pair.cc passes over
the operations that it is reading or writing), and who waits for it waits until a timeout.
"""

from __future__ import annotations

import contextlib
import hmac
import pickle
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_multigpu.communication.shared_memory.segment import OfferedSegment

_ALIGNMENT_BYTES = 64
_LENGTH, _HEADER = struct.Struct("<q"), struct.Struct("<qq")  # of a message; the number of a tensor, and its bytes
_TOKEN_BYTES = 32
_HELLO = struct.Struct(f"<{_TOKEN_BYTES}sIB64s")  # token, worker, 0 or 1 for messages or tensors, the worker's address
_HELLO_S = 5.0
_LAST_WORDS_S = 1
_TIME = struct.Struct("ll")  # struct timeval


class PairEndedError(RuntimeError):
    """The process at the other end has ended or failed, or the connection to it has."""


@dataclass(frozen=True)
class LastWords:
    """The last message of a process that has failed."""

    text: str


class Pair:
    """One end of the connections between a worker and a server, as :func:`connected` and :func:`accepted` make them.

    Args:
        label: of the other end, for errors.
        reads_ahead: a thread takes tensors as they come, so that the other end can send while this one computes.

    Attributes:
        connections: for messages, and for tensors.
        shares_memory: both ends are on one host, and map memory of the server.
        rooms: where the tensors of a part go; there is one before the other end is asked for a tensor.
        news: the last that came beside a message; None before.
        background: a thread that works for this pair, one thing after the other.
    """

    def __init__(self, requests: socket.socket, tensors: socket.socket, *, label: str, reads_ahead: bool) -> None:
        self.label, self.connections = label, (requests, tensors)
        self.shares_memory = False
        self.news: Any = None
        self.background = ThreadPoolExecutor(1, f"to {label}")
        self.rooms: dict[int, Tensor] = {}
        self._arrived: Counter[int] = Counter()
        self._last_words, self._is_read = "", False
        self._sending, self._receiving, self._arriving = threading.Lock(), threading.Lock(), threading.Condition()
        self._reader: threading.Thread | None = None
        if reads_ahead:
            self._reader = threading.Thread(target=self._read_ahead, name=f"from {label}", daemon=True)
            self._reader.start()

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Within the block errors of the connections become :class:`PairEndedError`, with the last words if any came.

        They may have come before the error, behind messages that nobody is going to read.
        """
        try:
            yield
        except (OSError, EOFError) as error:
            with contextlib.suppress(OSError, EOFError):
                self.connections[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(_LAST_WORDS_S, 0))
                while not self._last_words:
                    self._receive()
            words = f"failed: {self._last_words}" if self._last_words else "ended, or the connection to it"
            raise PairEndedError(f"{self.label} has {words}") from error

    def cut(self) -> None:
        """Ends all waits at both ends."""
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connections; what the other end has not read yet still arrives."""
        self.cut()
        self.background.shutdown(cancel_futures=True)
        if self._reader is not None:
            self._reader.join()
        for connection in self.connections:
            connection.close()

    # Messages

    def send(self, message: Any, news: Any = None, *, timeout_s: int = 0) -> None:
        """Sends a message, and news beside it.

        Args:
            timeout_s: how long the other end may take nothing; 0 for any time.

        Raises:
            PairEndedError: the other end has ended.
            ValueError: the message has a value that cannot be pickled.
        """
        try:
            data = pickle.dumps((message, news))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"a value for {self.label} cannot be pickled: {error}; in options of optimizers and states of "
                "callbacks use functions of a module, and no lambda or open file"
            ) from error
        requests, _ = self.connections
        with self.failing(), self._sending:
            if timeout_s:
                requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(timeout_s, 0))
            requests.sendall(_LENGTH.pack(len(data)), socket.MSG_MORE)
            requests.sendall(data)

    def receive(self) -> Any:
        """Waits for the next message.

        Raises:
            PairEndedError: the other end has ended, or it has failed and says why.
        """
        with self.failing():
            return self._receive()

    def _receive(self) -> Any:
        with self._receiving:
            if self._last_words:
                raise EOFError
            [length] = _LENGTH.unpack(_read(self.connections[0], _LENGTH.size))
            message, news = pickle.loads(_read(self.connections[0], length))
            if isinstance(message, LastWords):
                self._last_words = message.text
                raise EOFError
        if news is not None:
            self.news = news
        return message

    # Tensors

    def take(self, number: int) -> None:
        """Waits for the tensor of a room; raises as :meth:`Room.take`."""
        with self.failing(), self._arriving:
            while not self._arrived[number]:
                if self._reader is None:
                    self._take_next()
                elif self._is_read:
                    raise EOFError
                else:
                    self._arriving.wait()
            self._arrived[number] -= 1

    def _take_next(self) -> None:
        """Takes the tensor that comes next."""
        number, size_bytes = _HEADER.unpack(_read(self.connections[1], _HEADER.size))
        if size_bytes:
            _fill(self.connections[1], _bytes_of(self.rooms[number]))
        with self._arriving:
            self._arrived[number] += 1
            self._arriving.notify_all()

    def _read_ahead(self) -> None:
        try:
            with contextlib.suppress(OSError, EOFError):
                while True:
                    self._take_next()
        finally:
            with self._arriving:
                self._is_read = True
                self._arriving.notify_all()


@dataclass(eq=False)
class Room:
    """One end of the memory for the tensors of a part of the model: gradients one way, and weights the other way.

    Args:
        number: of the part, in the job.
        out: the flat tensor that this end sends.
        into: the flat tensor that it receives.
    """

    pair: Pair
    number: int
    out: Tensor
    into: Tensor

    def __post_init__(self) -> None:
        self.pair.rooms[self.number] = self.into

    def send(self) -> None:
        """Sends :attr:`out`, or tells that it is in shared memory; of one thread of a pair at a time.

        Raises:
            PairEndedError: the other end has ended.
        """
        data, tensors = memoryview(b"") if self.pair.shares_memory else _bytes_of(self.out), self.pair.connections[1]
        with self.pair.failing():
            tensors.sendall(_HEADER.pack(self.number, len(data)), socket.MSG_MORE if data else 0)
            tensors.sendall(data)

    def begin_to_send(self) -> Callable[[], None]:
        """Sends :attr:`out` beside this thread, where it takes time; returns what waits for that."""
        if not self.pair.shares_memory:
            return self.pair.background.submit(self.send).result
        self.send()
        return lambda: None

    def take(self) -> Tensor:
        """Waits for :attr:`into`.

        Raises:
            PairEndedError: the other end has ended, or it has failed and says why.
        """
        self.pair.take(self.number)
        return self.into


def connected(entrance: str, worker: int, address: str, *, label: str, timeout_s: float) -> Pair:
    """A worker's end.

    Args:
        entrance: the server's, as it has published it.
        address: of the worker's host.
        label: of the server, for errors.

    Raises:
        PairEndedError: the server cannot be reached.
    """
    host, port, token = entrance.split()
    ends = []
    try:
        for kind in (0, 1):
            ends.append(socket.create_connection((host, int(port)), timeout_s))
            ends[kind].sendall(_HELLO.pack(bytes.fromhex(token), worker, kind, address.encode()))
    except OSError as error:
        for end in ends:
            end.close()
        raise PairEndedError(f"{label} cannot be reached: {error}") from error
    return Pair(*map(_ready, ends), label=label, reads_ahead=False)


def accepted(
    address: str, num_workers: int, timeout_s: float, publish: Callable[[str], object]
) -> list[tuple[Pair, str]]:
    """A server's ends: of each worker the pair, and the address of its host.

    Args:
        address: of the server's host.
        publish: tells the workers the entrance: where to connect, and the token that they show.

    Raises:
        PairEndedError: a worker has not come in time.
    """
    until_s = time.monotonic() + timeout_s
    ends: dict[tuple[int, int], tuple[socket.socket, str]] = {}
    wanted = [(worker, kind) for worker in range(num_workers) for kind in (0, 1)]
    token, family = secrets.token_bytes(_TOKEN_BYTES), socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=len(wanted)) as listener:
        publish(f"{address} {listener.getsockname()[1]} {token.hex()}")
        while missing := [each for each in wanted if each not in ends]:
            listener.settimeout(max(0.001, until_s - time.monotonic()))
            try:
                end, _ = listener.accept()
            except TimeoutError:
                raise PairEndedError(f"worker {missing[0][0]} did not come within {timeout_s:g} s") from None
            hello = bytes(_HELLO.size)
            with contextlib.suppress(OSError, EOFError):
                end.settimeout(_HELLO_S)
                hello = bytes(_read(end, _HELLO.size))
            told, worker, kind, of_worker = _HELLO.unpack(hello)
            if hmac.compare_digest(told, token):
                ends[worker, kind] = end, of_worker.rstrip(b"\0").decode()
            else:
                end.close()  # no worker
    return [
        (
            Pair(*(_ready(ends[worker, kind][0]) for kind in (0, 1)), label=f"worker {worker}", reads_ahead=True),
            ends[worker, 0][1],
        )
        for worker in range(num_workers)
    ]


def _ready(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _read(connection: socket.socket, size_bytes: int) -> bytearray:
    data = bytearray(size_bytes)
    _fill(connection, memoryview(data))
    return data


def _fill(connection: socket.socket, view: memoryview) -> None:
    """Raises EOFError if the connection ends first."""
    while view:
        size_bytes = connection.recv_into(view, len(view), socket.MSG_WAITALL)
        if not size_bytes:
            raise EOFError
        view = view[size_bytes:]


def offered(flats: Sequence[Tensor]) -> tuple[OfferedSegment, list[Tensor]]:
    """Memory that workers of this host may map, and in it a tensor like each of these flat ones."""
    segment = OfferedSegment(sum(_aligned(flat.nbytes) for flat in flats))
    return segment, [*cut(segment.memory, flats)]


def cut(memory: Tensor, flats: Sequence[Tensor]) -> Iterator[Tensor]:
    """Tensors like these flat ones in the memory of all, uint8."""
    start = 0
    for flat in flats:
        yield memory[start : start + flat.nbytes].view(flat.dtype)
        start += _aligned(flat.nbytes)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
