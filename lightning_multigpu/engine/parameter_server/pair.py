"""A worker and a parameter server: two process groups of two, outside of the job's own groups.

A message is a pickled value. Tensors travel beside the messages, over a connection of their own: a message does not
wait behind gradients that are on their way. The ends of one host share memory for tensors, and only tell each other
that a tensor is there::

    worker   .grad --copied--> [ out  ]               [ into ] --copied--> parameters
    ............................  |  ....................^..........................
    server                     [ into ] average, update [ out  ]
"""

from __future__ import annotations

import contextlib
import pickle
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lightning_multigpu.communication.connections import Connections
from lightning_multigpu.communication.shared_memory.segment import OfferedSegment

_NEVER = timedelta(days=365)
_FRAME_BYTES = 4096  # a longer message takes two transfers
_LENGTH_BYTES = 8
_FRAME, _REST = 0, 1
_ALIGNMENT_BYTES = 64
_THERE = torch.ones(1, dtype=torch.uint8)
_OF_CONNECTION = re.compile(r"(?i)^\[\S*gloo/|connect|timed? ?out|closed")  # Gloo has one type for all of its errors


class PairEndedError(RuntimeError):
    """The process at the other end has ended or failed, or the connection to it has."""


@dataclass(frozen=True)
class LastWords:
    """The last message of a process that has failed."""

    text: str


class Reply:
    """A message that the other end is going to send, expected before that: it arrives even if the other end fails."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        self._work = pair.requests.recv([self._frame], pair.other, _FRAME)

    def get(self) -> Any:
        """Waits for the message; messages are to be got in the order in which they were expected.

        Raises:
            PairEndedError: the other end has ended, or it has failed and says why.
        """
        with self._pair.failing():
            self._work.wait()
            length = int(self._frame[:_LENGTH_BYTES].view(torch.int64))
            data = self._frame[_LENGTH_BYTES:][:length]
            if length > data.numel():
                rest = torch.empty(length - data.numel(), dtype=torch.uint8)
                self._pair.requests.recv([rest], self._pair.other, _REST).wait()
                data = torch.cat([data, rest])
        message, news = pickle.loads(data.numpy().tobytes())
        if isinstance(message, LastWords):
            raise PairEndedError(f"{self._pair.label} has failed: {message.text}")
        if news is not None:
            self._pair.news = news
        return message

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """Within the block the other end is sent something, or sends it before the message; if it fails, it says why.

        Raises:
            PairEndedError: the other end has ended, or it has failed and says why.
        """
        try:
            yield
        except PairEndedError:
            self.get()
            raise


class Pair:
    """One end of the connections between a worker and a server; made by both ends at the same time.

    Args:
        name: of the pair, the same at both ends.
        label: of the other end, for errors.

    Attributes:
        shares_memory: both ends are on one host, and map memory of the server.
        news: the last that came beside a message; None before.

    Raises:
        PairEndedError: the other end has not come in time.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        label: str,
        is_server: bool,
        connections: Connections,
        timeout_s: float,
    ) -> None:
        self.label = label
        self.other = 0 if is_server else 1
        self.shares_memory = False
        self.news: Any = None
        self._expected: Reply | None = None
        self._sending = threading.Lock()
        with self.failing(), connections.noted():
            groups: list[Any] = [
                dist.ProcessGroupGloo(
                    PrefixStore(f"{name}/{each}", store), int(is_server), 2, timedelta(seconds=timeout_s)
                )
                for each in ("requests", "tensors")
            ]
        self.requests, self.tensors = groups
        for group in groups:
            group._set_default_timeout(_NEVER)  # the end of a connection ends its waits

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Within the block errors of the connection become :class:`PairEndedError`; other errors stay as they are."""
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or _OF_CONNECTION.search(str(error))):
                raise
            raise PairEndedError(f"{self.label} has ended, or the connection to it") from error

    # Messages

    def send(self, message: Any, news: Any = None, *, timeout: timedelta = _NEVER) -> None:
        """Sends a message, and news beside it; returns when the other end has taken it.

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
        frame = torch.zeros(_FRAME_BYTES, dtype=torch.uint8)
        frame[:_LENGTH_BYTES].view(torch.int64).fill_(len(data))
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        first = payload[: _FRAME_BYTES - _LENGTH_BYTES]
        frame[_LENGTH_BYTES : _LENGTH_BYTES + first.numel()] = first
        with self.failing(), self._sending:
            works = [self.requests.send([frame], self.other, _FRAME)]
            if len(payload) > len(first):
                works.append(self.requests.send([payload[len(first) :]], self.other, _REST))
            for work in works:
                work.wait(timeout)

    def expect(self) -> Reply:
        """Expects a message, before the other end is asked for it; the last words of the other end come at any time."""
        with self.failing():
            expected, self._expected = self._expected or Reply(self), None
        with contextlib.suppress(RuntimeError):  # the other end has ended: its last words are in the one before
            self._expected = Reply(self)
        return expected

    def receive(self) -> Any:
        """Waits for a message that was not expected.

        Raises:
            PairEndedError: the other end has ended.
        """
        return self.expect().get()


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
    _expected: Any = field(default=None, init=False)

    def send(self) -> Any:
        """Begins to send :attr:`out`, or to tell that it is in shared memory; returns the transfer, to wait for."""
        with self.pair.failing():
            data = _THERE if self.pair.shares_memory else self.out.view(torch.uint8)
            return self.pair.tensors.send([data], self.pair.other, self.number)

    def expect(self) -> None:
        """Begins to wait for a tensor, unless it waits already: the other end sends nothing before that.

        So it is called long before the tensor is due: on a connection the word for it would wait behind tensors.
        """
        if self._expected is None:
            with self.pair.failing():
                data = torch.empty_like(_THERE) if self.pair.shares_memory else self.into.view(torch.uint8)
                self._expected = self.pair.tensors.recv([data], self.pair.other, self.number)

    def take(self) -> Tensor:
        """Waits for the tensor."""
        self.expect()
        with self.pair.failing():
            self._expected.wait()
        self._expected = None
        return self.into


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
