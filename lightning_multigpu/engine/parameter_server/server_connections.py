"""A worker's connections to the parameter servers of its job."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import Tensor

from lightning_multigpu.communication.channel import Channel, ChannelError, connect
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.parameter_server.consistency import Consistency
from lightning_multigpu.engine.parameter_server.server_statistics import ServerStatistics
from lightning_multigpu.engine.parameter_server.wire import (
    bytes_of,
    packed,
    room_for,
)

_LEAVING_S = 5.0
_LATE_S = 5.0


class ServerError(RuntimeError):
    """A parameter server has ended, cannot be reached, or refuses what a worker sends."""


Payload = Sequence[memoryview] | Callable[[], Sequence[memoryview]]
Fields = dict[str, Any]
_URGENT, _NORMAL, _LAST = range(3)
_Frame = tuple[Fields, Payload, Callable[[], None] | None]
# How urgent a frame is, a number in order, and where it goes; None ends the thread that sends.
_Outbox = queue.PriorityQueue[tuple[int, int, "tuple[_Connection, _Frame] | None"]]


@dataclass
class _Connection:
    """One server: its channel, and what is to be sent to it."""

    number: int
    name: str
    channel: Channel
    outbox: _Outbox


class ServerConnections:
    """This worker's connections to all servers of a job, which :meth:`open` makes.

    Args:
        addresses: host and port of each server; all workers have the same list.
        secret: of the job.
        worker: the number of this worker; None for one that joins a job which is there.
        num_workers: of the job; those that join are not counted.
        consistency: the rules of the job, the same on all workers.
        shares: of the weights' bytes, one for each server, the same on all workers; None for even ones.
        meter: told of every push and pull.
        gather: collects an object of every worker, in their order; a collective.

    Attributes:
        lost: on worker 0 of an asynchronous job, the workers that are gone: number, batches that they had, and how many
            are left.
        joined_in: the epoch of the job that this worker has joined; None for one of the first workers.
        is_stopped: worker 0 has ended training, or all batches are taken.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        secret: bytes,
        *,
        worker: int | None,
        num_workers: int,
        consistency: Consistency | None = None,
        shares: Sequence[int] | None = None,
        meter: Meter,
        gather: Callable[[Any], list[Any]],
    ) -> None:
        self.worker = -1 if worker is None else worker
        self.num_workers, self.num_servers = num_workers, len(addresses)
        self.joined_in: int | None = None
        self.meter, self.gather = meter, gather
        self._addresses, self._secret = addresses, secret
        self.consistency = consistency or Consistency()
        self.shares = list(shares or [1] * len(addresses))
        self.lost: list[Fields] = []
        self.is_stopped = False
        self._arrived = threading.Condition()
        self._problem: str | None = None
        self._answers: list[list[tuple[Fields, list[Tensor]]]] = [[] for _ in addresses]
        self._receivers: dict[int, Callable[[int, Fields, int, Channel], None]] = {}
        self._is_leaving = False
        self._threads: list[threading.Thread] = []
        self._connections: list[_Connection] = []
        self._optimizers = 0
        self._order = count()
        self._outboxes: list[_Outbox] = []

    def open(self, *, timeout_s: float, on_late: Callable[[str], None] = lambda _: None) -> None:
        """Connects to all servers; :meth:`cut` ends it.

        Args:
            timeout_s: how long to look for the servers.
            on_late: told the name of each server that is not there after 5 s.

        Raises:
            ServerError: a server cannot be reached, or does not belong to this job.
        """
        try:
            start_s = time.monotonic()
            for number in range(self.num_servers):
                self._connections.append(self._found(number, start_s, timeout_s, on_late))
            work: list[tuple[Callable[[Any], None], Any]] = [(self._write, outbox) for outbox in self._outboxes]
            for target, of in work + [(self._read, connection) for connection in self._connections]:
                thread = threading.Thread(target=target, args=(of,), name="to and from parameter servers", daemon=True)
                thread.start()
                self._threads.append(thread)
            others = range(self.num_servers)
            if self.worker < 0:
                self._join()
                others = range(1, self.num_servers)
            hello: Fields = {"kind": "hello", "worker": self.worker, "num_workers": self.num_workers}
            hello.update(consistency=dataclasses.asdict(self.consistency), shares=self.shares)
            for number in others:
                self.post(number, {**hello, "num_servers": self.num_servers})
            self.answers("welcome", others)
        except BaseException:
            self.cut()
            self.close()
            raise

    def _join(self) -> None:
        """Takes a number of its own, and what else the job's workers know, from the first server."""
        self.post(0, {"kind": "hello", "joins": True, "num_servers": self.num_servers})
        ((fields, _),) = self.answers("welcome", (0,))
        self.worker, self.num_workers, self.joined_in = fields["worker"], fields["num_workers"], fields["epoch"]
        self.consistency, self.shares = Consistency(**fields["consistency"]), fields["shares"]

    def _found(self, number: int, start_s: float, timeout_s: float, on_late: Callable[[str], None]) -> _Connection:
        """The connection to a server, when the server listens."""
        host, port = self._addresses[number]
        name = f"parameter server {number} of {self.num_servers} ({host} port {port})"
        untold = [name]

        def before_retry() -> None:
            self.wait_until(lambda: True)  # raises after a cut
            if time.monotonic() - start_s > _LATE_S and untold:
                on_late(untold.pop())

        left_s = max(0.1, start_s + timeout_s - time.monotonic())
        try:
            channel = connect(host, port, self._secret, timeout_s=left_s, before_retry=before_retry)
        except ChannelError as error:
            raise ServerError(f"{name} is not there: {error}") from error
        # TCP divides a link evenly between connections. Where parts of a bucket are not even, one thread sends them one
        # after the other, so that none of them comes late.
        if not self._outboxes or len({*self.shares}) == 1:
            self._outboxes.append(queue.PriorityQueue())
        return _Connection(number, name, channel, self._outboxes[-1])

    def new_number(self, receive: Callable[[int, Fields, int, Channel], None]) -> int:
        """The number of one more optimizer; ``receive`` takes each part that a server sends for it."""
        self._optimizers += 1
        self._receivers[self._optimizers - 1] = receive
        return self._optimizers - 1

    def post(
        self,
        server: int,
        fields: Fields,
        payload: Payload = (),
        *,
        is_urgent: bool = True,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Sends a frame; urgent ones, in their order, overtake the others.

        Args:
            server: its number.
            fields: of the frame.
            payload: stays as it is until it is sent; a function is called when the frame's turn has come.
            is_urgent: False for gradients.
            on_sent: called when it is sent, on the thread that sends.
        """
        self._put(self._connections[server], (fields, payload, on_sent), _URGENT if is_urgent else _NORMAL)

    def _put(self, connection: _Connection, frame: _Frame, urgency: int) -> None:
        connection.outbox.put((urgency, next(self._order), (connection, frame)))

    def post_value(self, server: int, fields: Fields, value: Any, what: str) -> None:
        """Sends a frame with a value that :func:`packed` takes."""
        tensors: list[Tensor] = []
        body = packed(value, tensors, what=what)
        self.post(server, {**fields, "body": body}, [bytes_of(tensor) for tensor in tensors])

    def answers(self, kind: str, of: Sequence[int] | None = None) -> list[tuple[Fields, list[Tensor]]]:
        """The next answer of every server, or of some: its fields, and its tensors.

        Raises:
            ServerError: a server has ended, or refuses what it was sent.
        """
        waiting = [self._answers[server] for server in (range(self.num_servers) if of is None else of)]
        self.wait_until(lambda: all(waiting))
        found = [answers.pop(0) for answers in waiting]
        assert all(fields["kind"] == kind for fields, _ in found)
        return found

    def statistics(self) -> ServerStatistics:
        """What all servers have counted since they started."""
        for server in range(self.num_servers):
            self.post(server, {"kind": "statistics"})
        return ServerStatistics.of([fields for fields, _ in self.answers("statistics")])

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Waits for what threads change within :meth:`arriving`.

        Raises:
            ServerError: a server has ended, or refuses what it was sent.
        """
        with self._arrived:
            self._arrived.wait_for(lambda: self._problem is not None or is_true())
            if self._problem is not None:
                raise ServerError(self._problem)

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Within the block a thread changes what another waits for."""
        with self._arrived:
            yield
            self._arrived.notify_all()

    def cut(self) -> None:
        """Ends all waiting, when a rank has failed."""
        self._fails("the connections to the parameter servers were cut")
        for connection in self._connections:
            connection.channel.shut_down()

    def close(self) -> None:
        """Says goodbye; the servers end when all workers have."""
        self._is_leaving = True
        for connection in self._connections:
            self._put(connection, ({"kind": "goodbye"}, (), None), _LAST)
        for outbox in self._outboxes:
            outbox.put((_LAST, next(self._order), None))
        deadline_s = time.monotonic() + _LEAVING_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        for connection in self._connections:
            connection.channel.shut_down()
            connection.channel.close()

    def _fails(self, problem: str) -> None:
        with self.arriving():
            self._problem = self._problem or problem

    def _write(self, outbox: _Outbox) -> None:
        while (posted := outbox.get()[2]) is not None:
            connection, (fields, payload, on_sent) = posted
            try:
                connection.channel.send(fields, payload() if callable(payload) else payload)
                if on_sent is not None:
                    on_sent()
            except ChannelError:
                continue  # the thread that reads knows more
            except Exception as error:  # a copy from a device has failed, for example
                self._fails(f"a push to {connection.name} has failed: {type(error).__name__}: {error}")

    def _read(self, connection: _Connection) -> None:
        try:
            while True:
                fields, payload_bytes = connection.channel.receive()
                if fields.get("kind") == "part":
                    self._receivers[fields["optimizer"]](connection.number, fields, payload_bytes, connection.channel)
                    continue
                if fields.get("kind") == "lost":
                    if connection.number == 0:  # all servers see it
                        with self.arriving():
                            self.lost.append(fields)
                    continue
                if fields.get("kind") == "stop":
                    self.is_stopped = True
                    continue
                body = fields.get("body")
                tensors = room_for(body, payload_bytes)
                connection.channel.receive_into([bytes_of(tensor) for tensor in tensors])
                if fields.get("kind") == "error":
                    self._fails(f"{connection.name}: {fields.get('text')}")
                    return
                with self.arriving():
                    self._answers[connection.number].append((fields, tensors))
        except ChannelError as error:
            if not self._is_leaving:
                self._fails(f"{connection.name} has ended: {error}")
        except Exception as error:
            self._fails(f"{connection.name} sends what is no message: {type(error).__name__}: {error}")
