"""A worker's connections to the parameter servers of its job."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from lightning_multigpu.communication.connections import Connections
from lightning_multigpu.communication.interface import source_address
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.shared_memory.segment import mapped
from lightning_multigpu.engine.parameter_server.pair import Pair, PairEndedError, Reply
from lightning_multigpu.engine.parameter_server.server import Job
from lightning_multigpu.engine.parameter_server.server_statistics import ServerStatistics

_LEAVING = timedelta(seconds=5)
_LOOK_S = 1.0  # between two checks for machines that have vanished


class ServerError(RuntimeError):
    """A parameter server has ended, cannot be reached, or has failed."""


class Answer:
    """The answer of a server, by its number, to a question."""

    def __init__(self, servers: Servers, server: int, reply: Reply) -> None:
        self._servers, self._server, self._reply = servers, server, reply

    def get(self) -> Any:
        """Waits for it.

        Raises:
            ServerError: the server has ended, or has failed.
        """
        with self._servers.reported():
            value, news = self._reply.get()
        if self._server == 0 and news is not None:
            self._servers.is_stopped, self._servers.lost = news
        return value

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """Within the block tensors come from the server before its answer; a server that fails answers why."""
        try:
            yield
        except PairEndedError:
            self.get()
            raise


class Servers:
    """This worker's connections to all servers of a job, which :meth:`join` makes.

    Args:
        job: the job.
        worker: the number of this worker.
        meter: told of every push and pull.

    Attributes:
        unshared: the servers of this host with which no memory is shared: their name, and why.
        lost: on worker 0 of an asynchronous job, for each lost worker its number, how many batches it had, and how
            many workers are left; as of the last answer of server 0.
        is_stopped: worker 0 has ended training; as of the last answer of server 0.
        numbers_of_optimizers: one for each further optimizer.
        numbers_of_buckets: one for each further bucket, of any optimizer.
    """

    def __init__(self, job: Job, *, worker: int, meter: Meter) -> None:
        self.job, self.worker, self.meter = job, worker, meter
        self.unshared: dict[str, str] = {}
        self.lost: list[dict[str, int]] = []
        self.is_stopped = False
        self.pairs: list[Pair] = []
        self._connections = Connections()
        self._background = [ThreadPoolExecutor(1, "parameter servers") for _ in range(job.num_servers)]
        self._is_cut = False
        self._has_left = threading.Event()
        self.numbers_of_optimizers, self.numbers_of_buckets = itertools.count(), itertools.count()

    @property
    def is_synchronous(self) -> bool:
        return self.job.is_synchronous

    def join(self, store: Store, await_server: Callable[[int], None]) -> None:
        """Connects to all servers; :meth:`cut` ends it.

        Args:
            store: of the job.
            await_server: waits until the server of a number has come to the store; may raise.

        Raises:
            ServerError: a server does not answer.
        """
        own = source_address(self.job.address) or ""
        store.set(f"{self.job.name}/worker {self.worker}", own)
        for number in range(self.job.num_servers):
            await_server(number)
            where = store.get(f"{self.job.name}/server {number}").decode()
            label = f"parameter server {number} of {self.job.num_servers} ({where})"
            with self.reported():
                pair = Pair(
                    store,
                    f"{self.job.name}/{self.worker} and {number}",
                    label=label,
                    is_server=False,
                    connections=self._connections,
                    timeout_s=self.job.join_timeout_s,
                )
                self.pairs.append(pair)
                offer = pair.receive()
                try:
                    pair.shares_memory = offer is not None and mapped(offer) is not None
                except OSError as error:
                    self.unshared[label] = str(error)
                pair.send(pair.shares_memory)
        threading.Thread(target=self._watch, name="parameter servers", daemon=True).start()

    def _watch(self) -> None:
        while not self._has_left.wait(_LOOK_S):
            self._connections.cut_silent(self.job.silence_s)

    def tell(self, server: int, *message: Any) -> None:
        """Sends a server a message that it does not answer."""
        with self.reported():
            self.pairs[server].send(message)

    def ask(self, server: int, *message: Any) -> Answer:
        """Asks a server; the answers of a server are to be got in the order of the questions."""
        with self.reported():
            expected = self.pairs[server].expect()
            try:
                self.pairs[server].send(message)
            except PairEndedError:
                expected.get()  # raises what the server has said before it ended
                raise
        return Answer(self, server, expected)

    def expect(self, server: int) -> Answer:
        """A message that the server sends before it answers the next question."""
        with self.reported():
            return Answer(self, server, self.pairs[server].expect())

    def in_background(self, server: int, work: Callable[[], None]) -> Future[None]:
        """Does work for a server in the background, after what was begun for it before."""
        return self._background[server].submit(work)

    def statistics(self) -> ServerStatistics:
        """What all servers have counted since they started."""
        asked = [self.ask(server, "statistics") for server in range(self.job.num_servers)]
        return ServerStatistics.of([answer.get() for answer in asked])

    def cut(self) -> None:
        """Ends all waiting, when a rank has failed."""
        self._is_cut = True
        self._connections.cut()

    def close(self) -> None:
        """Leaves the servers, which end when all workers have left."""
        self._has_left.set()
        for pair in [] if self._is_cut else self.pairs:
            with contextlib.suppress(PairEndedError):
                pair.send(("goodbye",), _LEAVING)
        for background in self._background:
            background.shutdown(cancel_futures=True)
        self.pairs.clear()

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Within the block the end of a connection becomes a :class:`ServerError`."""
        try:
            yield
        except PairEndedError as error:
            if self._is_cut:
                raise ServerError("the connections to the parameter servers were cut") from error
            raise ServerError(str(error)) from error
