"""A worker's connections to the parameter servers of its job."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from torch import Tensor

from lightning_multigpu.communication.channel import Channel, ChannelError, connect
from lightning_multigpu.communication.checksums import bytes_of
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.metering.records import Transfer
from lightning_multigpu.communication.shared_memory.segment import mapped
from lightning_multigpu.engine.parameter_server.bucket_memory import BucketMemory, copy_in, cut
from lightning_multigpu.engine.parameter_server.consistency import Consistency
from lightning_multigpu.engine.parameter_server.server_statistics import ServerStatistics
from lightning_multigpu.engine.parameter_server.wire import (
    packed,
    room_for,
)

_LEAVING_S = 5.0
_LATE_S = 5.0
_LOOK_S = 1.0  # between two checks for machines that have vanished


class ServerError(RuntimeError):
    """A parameter server has ended, cannot be reached, or refuses what a worker sends."""


Payload = Sequence[memoryview] | Callable[[], Sequence[memoryview]]
Fields = dict[str, Any]
_URGENT, _NORMAL, _LAST = range(3)
_Frame = tuple[Fields, Payload, Transfer | None]
_Memory = dict[tuple[int, int], BucketMemory]
# How urgent a frame is, a number in order, and the frame; None ends the thread that sends.
_Outbox = queue.PriorityQueue[tuple[int, int, _Frame | None]]


class Receiver(Protocol):
    """An optimizer, to which servers send weights or averages."""

    def receive(
        self, server: int, fields: Fields, payload_bytes: int, channel: Channel, memory: BucketMemory | None
    ) -> None:
        """Takes what a server sends for it, or has in memory; on the thread that reads from the server."""


@dataclass(eq=False)
class _Connection:
    """One server: its channel, what is to be sent to it, and its answers.

    ``requests`` is a second channel to a server on another host: there, what is urgent does not wait behind gradients
    that are on their way.
    ``memory`` is that of the buckets, by number of their optimizer and their own, which a server on this host shares.
    """

    number: int
    name: str
    channel: Channel
    outbox: _Outbox = field(default_factory=queue.PriorityQueue)
    requests: Channel | None = None
    answers: list[tuple[Fields, list[Tensor]]] = field(default_factory=list)
    memory: _Memory = field(default_factory=dict)

    def shut_down(self) -> None:
        """Ends the connections for both ends."""
        self.channel.shut_down()
        if self.requests is not None:
            self.requests.shut_down()


class ServerConnections:
    """This worker's connections to all servers of a job, which :meth:`open` makes.

    Args:
        addresses: host and port of each server; all workers have the same list.
        secret: of the job.
        worker: the number of this worker.
        num_workers: of the job.
        consistency: the rules of the job, the same on all workers.
        meter: told of every push and pull.
        gather: collects an object of every worker, in their order; a collective.
        silence_s: how long the machine of a server may be silent before the server counts as ended, and the servers
            wait for this worker's machine; None to wait until the system gives up.
        shares_memory: exchange gradients and weights with servers of this host through memory, and not over sockets.

    Attributes:
        unshared: the servers of this host with which no memory is shared: their name, and why.
        lost: on worker 0 of an asynchronous job, for each lost worker its number, how many batches it had, and how
            many workers are left.
        is_stopped: worker 0 has ended training.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        secret: bytes,
        *,
        worker: int,
        num_workers: int,
        consistency: Consistency | None = None,
        meter: Meter,
        gather: Callable[[Any], list[Any]],
        silence_s: float | None = None,
        shares_memory: bool = True,
    ) -> None:
        self.worker, self.num_workers, self.num_servers = worker, num_workers, len(addresses)
        self.meter, self.gather = meter, gather
        self._addresses, self._secret = addresses, secret
        self.consistency = consistency or Consistency()
        self._silence_s = silence_s
        self._shares_memory = shares_memory
        self.unshared: dict[str, str] = {}
        self.lost: list[Fields] = []
        self.is_stopped = False
        self._arrived = threading.Condition()
        self._problem: str | None = None
        self._receivers: dict[int, Receiver] = {}
        self._is_leaving = False
        self._threads: list[threading.Thread] = []
        self._connections: list[_Connection] = []
        self._optimizers = 0
        self._order = count()

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
            for connection in self._connections:
                for work in (self._write, self._read):
                    thread = threading.Thread(target=work, args=(connection,), name="parameter servers", daemon=True)
                    thread.start()
                    self._threads.append(thread)
                hello = {
                    "kind": "hello",
                    "worker": self.worker,
                    "num_workers": self.num_workers,
                    "num_servers": self.num_servers,
                    "consistency": dataclasses.asdict(self.consistency),
                    "silence_s": self._silence_s,
                    "shares_memory": self._may_share(connection),
                }
                self.post(connection.number, hello)
            self.answers("welcome")
            for connection in self._connections:
                if not self._may_share(connection):
                    self._open_requests(connection, timeout_s)
        except BaseException:
            self.cut()
            self.close()
            raise

    def _open_requests(self, connection: _Connection, timeout_s: float) -> None:
        """Opens the second connection to a server, and waits until the server knows whose it is."""

        def raise_problem() -> None:
            self.wait_until(lambda: True)

        try:
            requests = connection.requests = self._connected(
                connection.number, connection.name, timeout_s=timeout_s, before_retry=raise_problem
            )
            requests.send({"requests_of": self.worker})
            answer, _ = requests.receive()
        except ChannelError as error:
            with self._arrived:  # the first connection brings the reason
                self._arrived.wait_for(lambda: self._problem is not None, _LATE_S)
            raise_problem()
            raise ServerError(f"{connection.name} has ended: {error}") from error
        if answer.get("kind") != "welcome":
            raise ServerError(f"{connection.name}: {answer.get('text')}")

    def _may_share(self, connection: _Connection) -> bool:
        return self._shares_memory and connection.channel.is_within_host

    def _map(self, connection: _Connection, offered: Fields) -> None:
        """Maps the memory that a server offers for buckets, and confirms that before the first push."""
        try:
            if "problem" in offered:
                raise OSError(offered["problem"])
            sizes = [size for _, size in offered["buckets"]]
            memories = (cut(mapped(offer), sizes) for offer in offered["segments"])
            for (bucket, _), pushed, weights in zip(offered["buckets"], *memories, strict=True):
                connection.memory[offered["optimizer"], bucket] = BucketMemory(pushed, weights)
        except OSError as error:
            self.unshared.setdefault(connection.name, str(error))
        if "problem" not in offered:
            is_mapped = connection.name not in self.unshared
            told = {name: offered[name] for name in ("optimizer", "number")}
            self._put(connection, ({"kind": "memory", **told, "is_mapped": is_mapped}, (), None), _URGENT)

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
        channel = self._connected(number, name, timeout_s=left_s, before_retry=before_retry)
        return _Connection(number, name, channel)

    def _connected(self, number: int, name: str, **options: Any) -> Channel:
        try:
            channel = connect(*self._addresses[number], self._secret, **options)
        except ChannelError as error:
            raise ServerError(f"{name} is not there: {error}") from error
        if self._silence_s is not None:
            channel.watch(self._silence_s)
        return channel

    def new_number(self, receiver: Receiver) -> int:
        """The number of one more optimizer."""
        with self._arrived:
            self._optimizers += 1
            self._receivers[self._optimizers - 1] = receiver
            return self._optimizers - 1

    def post(
        self,
        server: int,
        fields: Fields,
        payload: Payload = (),
        *,
        is_urgent: bool = True,
        is_first: bool = False,
        push_bytes: int | None = None,
    ) -> None:
        """Sends a frame to a server; urgent ones, in their order, overtake the others.

        Args:
            server: its number.
            fields: of the frame.
            payload: stays as it is until it is sent; a function is called once, when the frame's turn has come.
            is_urgent: False for gradients.
            is_first: it may overtake all frames, also those that the kernel has.
            push_bytes: of gradients; the meter is told of them.
        """
        connection = self._connections[server]
        if is_first and (requests := connection.requests) is not None and not callable(payload):
            with suppress(ChannelError):  # the thread that reads is told by the server
                requests.send(fields, payload)
            return
        transfer = None
        if push_bytes is not None:
            memory = connection.memory.get((fields["optimizer"], fields["bucket"]))
            is_in_memory = memory is not None and push_bytes <= memory.pushed.numel()
            transfer = self.meter.begin(
                "push",
                group="servers",
                group_size=self.num_workers,
                size_bytes=push_bytes,
                memory_bytes=push_bytes if is_in_memory else 0,
                awaited=False,
            )
            fields = {**fields, "in_memory": is_in_memory}
        self._put(connection, (fields, payload, transfer), _URGENT if is_urgent else _NORMAL)

    def _put(self, connection: _Connection, frame: _Frame | None, urgency: int) -> None:
        connection.outbox.put((urgency, next(self._order), frame))

    def post_value(self, server: int, fields: Fields, value: Any, what: str) -> None:
        """Sends a frame with a value that :func:`packed` takes."""
        tensors: list[Tensor] = []
        body = packed(value, tensors, what=what)
        self.post(server, {**fields, "body": body}, [bytes_of(tensor) for tensor in tensors])

    def answers(self, kind: str, of: Sequence[int] | None = None) -> list[tuple[Fields, list[Tensor]]]:
        """The answer of every server, or of some, to what was posted to it: its fields, and its tensors.

        Raises:
            ServerError: a server has ended, or refuses what it was sent.
        """
        waiting = [self._connections[server].answers for server in (range(self.num_servers) if of is None else of)]

        def places() -> list[int | None]:  # an answer of another kind may have been asked for ahead
            return [next((i for i, (fields, _) in enumerate(each) if fields["kind"] == kind), None) for each in waiting]

        self.wait_until(lambda: None not in places())
        return [answers.pop(place) for answers, place in zip(waiting, places(), strict=True) if place is not None]

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
            while not self._arrived.wait_for(lambda: self._problem is not None or is_true(), _LOOK_S):
                for connection in self._connections:
                    connection.channel.end_if_silent()
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
            connection.shut_down()

    def close(self) -> None:
        """Leaves the servers, which end when all workers have left."""
        self._is_leaving = True
        for connection in self._connections:
            if connection.requests is not None:
                with suppress(ChannelError):
                    connection.requests.send({"kind": "goodbye"})
            self._put(connection, ({"kind": "goodbye"}, (), None), _LAST)
            self._put(connection, None, _LAST)
        deadline_s = time.monotonic() + _LEAVING_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        for connection in self._connections:
            connection.shut_down()
            connection.channel.close()
            if connection.requests is not None:
                connection.requests.close()
            connection.memory.clear()

    def _fails(self, problem: str) -> None:
        with self.arriving():
            self._problem = self._problem or problem

    def _write(self, connection: _Connection) -> None:
        while (frame := connection.outbox.get()[2]) is not None:
            fields, payload, transfer = frame
            try:
                parts = payload() if callable(payload) else payload
                if fields.get("in_memory"):
                    copy_in(parts, connection.memory[fields["optimizer"], fields["bucket"]].pushed)
                    parts = ()
                connection.channel.send(fields, parts)
            except ChannelError:
                pass  # the thread that reads knows more
            except Exception as error:  # a copy from a device has failed, for example
                self._fails(f"a push to {connection.name} has failed: {type(error).__name__}: {error}")
            if transfer is not None:
                transfer.finish()

    def _read(self, connection: _Connection) -> None:
        number = connection.number
        try:
            while True:
                fields, payload_bytes = connection.channel.receive()
                kind = fields.get("kind")
                if kind in ("part", "squares"):
                    memory = connection.memory.get((fields["optimizer"], fields.get("bucket", -1)))
                    self._receivers[fields["optimizer"]].receive(
                        number, fields, payload_bytes, connection.channel, memory
                    )
                    continue
                if kind == "lost":
                    if number == 0:  # all servers see it
                        with self.arriving():
                            self.lost.append(fields)
                    continue
                if kind == "stop":
                    self.is_stopped = True
                    continue
                body = fields.get("body")
                tensors = room_for(body, payload_bytes)
                connection.channel.receive_into([bytes_of(tensor) for tensor in tensors])
                if kind == "error":
                    self._fails(f"{connection.name}: {fields.get('text')}")
                    return
                with self.arriving():
                    if offered := fields.pop("memory", None):
                        self._map(connection, offered)
                    connection.answers.append((fields, tensors))
        except ChannelError as error:
            if not self._is_leaving:
                connection.shut_down()
                self._fails(f"{connection.name} has ended: {error}")
        except Exception as error:
            self._fails(f"{connection.name} sends what is no message: {type(error).__name__}: {error}")
