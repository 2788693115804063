"""A worker's connections to the parameter servers of its job.

Asynchronous workers are coordinated by the first server: their batches, the beginning and the end of training.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

from torch.distributed import Store  # type: ignore[attr-defined]

from lightning_multigpu.communication.connections import Connections
from lightning_multigpu.communication.interface import own_address
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.shared_memory.segment import mapped
from lightning_multigpu.engine.parameter_server.pair import Pair, PairEndedError, connected
from lightning_multigpu.engine.parameter_server.server import Job

_LEAVING_S = 5
_LOOK_S = 1.0  # between two checks for machines that have vanished


class Servers:
    """This worker's connections to all servers of a job, which :meth:`join` makes.

    Attributes:
        numbers_of_optimizers: one for each further optimizer.
        numbers_of_parts: one for each further part of the model, of any optimizer.
    """

    def __init__(self, job: Job, *, worker: int, meter: Meter) -> None:
        self.job, self.worker, self.meter = job, worker, meter
        self.pairs: list[Pair] = []
        self._connections = Connections()
        self._is_cut = False
        self._has_left = threading.Event()
        self.numbers_of_optimizers, self.numbers_of_parts = itertools.count(), itertools.count()

    def join(self, store: Store, await_server: Callable[[int], None]) -> None:
        """Connects to all servers; :meth:`cut` ends it.

        Args:
            await_server: waits until the server of a number has come to the store; may raise.

        Raises:
            PairEndedError: a server does not answer.
        """
        own = own_address(self.job.address)
        for number in range(self.job.num_servers):
            await_server(number)
            entrance = store.get(f"{self.job.name}/server {number}").decode()
            label = f"parameter server {number} of {self.job.num_servers} ({entrance.split()[0]})"
            pair = connected(entrance, self.worker, own, label=label, timeout_s=self.job.join_timeout_s)
            self._connections.note(*pair.connections)
            self.pairs.append(pair)
            if self._is_cut:
                pair.cut()
            if (offer := pair.receive()) is not None:
                with contextlib.suppress(OSError):  # in another container, or of another user: sockets carry all
                    pair.shares_memory = mapped(offer) is not None
            pair.send(pair.shares_memory)
        threading.Thread(target=self._watch, name="parameter servers", daemon=True).start()

    def _watch(self) -> None:
        while not self._has_left.wait(_LOOK_S):
            self._connections.cut_silent(self.job.silence_s)

    def tell(self, server: int, *message: Any) -> None:
        """Sends a server a message that it does not answer."""
        self.pairs[server].send(message)

    def ask(self, server: int, *message: Any) -> Callable[[], Any]:
        """Asks a server; returns what waits for the answer, to be called in the order of the questions."""
        self.pairs[server].send(message)
        return self.pairs[server].receive

    def staleness(self) -> dict[int, Counter[int]]:
        """How often the updates of each asynchronous worker had which staleness; all servers count alike."""
        asked = [self.ask(server, "staleness") for server in range(self.job.num_servers)]
        return next((counts for answer in asked if (counts := answer())), {})

    def cut(self) -> None:
        """Ends all waiting, when a rank has failed."""
        self._is_cut = True
        for pair in self.pairs:
            pair.cut()

    def close(self) -> None:
        """Leaves the servers, which end when all workers have left."""
        self._has_left.set()
        for pair in [] if self._is_cut else self.pairs:
            with contextlib.suppress(PairEndedError):
                pair.send(("goodbye",), timeout_s=_LEAVING_S)
        for pair in self.pairs:
            pair.close()
        self.pairs.clear()

    # Asynchronous workers

    def next_batch(self, epoch: int, *, first: int, num_batches: int) -> int | None:
        """The number of the next batch for this worker; None at the end of the epoch.

        Worker 0 waits while other workers have batches of the epoch, and gets those of workers that are lost. So the
        epoch has been trained by all when worker 0 comes to its end. ``first`` is the first batch that is left of the
        epoch.
        """
        number, may_return = self.ask(0, "next", epoch, first, num_batches, False)()
        if may_return:
            with self._waits():
                self.pause()
                number, _ = self.ask(0, "next", epoch, first, num_batches, True)()
        return None if number is None else int(number)

    def trained(self, epoch: int, number: int) -> None:
        """Reports that this worker's gradients of a batch are in the weights."""
        self.tell(0, "trained", epoch, number)

    def give_back(self, epoch: int) -> None:
        """Reports that this worker trains on no further batch of the epoch."""
        self.tell(0, "give back", epoch)

    @property
    def is_stopped(self) -> bool:
        """Whether worker 0 has stopped training, as of the last answer: this worker leaves the batches that it has."""
        return bool(self.pairs[0].news and self.pairs[0].news[0])

    @property
    def lost(self) -> list[dict[str, int]]:
        """On worker 0: of each lost worker its number, how many batches it had, and how many workers are left."""
        return self.pairs[0].news[1] if self.pairs[0].news else []

    @contextlib.contextmanager
    def _waits(self) -> Iterator[None]:
        """Within the block this worker waits for other workers; a hang report names them."""
        start_s = self.meter.now()
        with self.meter.begin("barrier", group="servers", group_size=self.job.num_workers, size_bytes=0):
            yield
        self.meter.waited(start_s, self.meter.now())

    def pause(self) -> None:
        """Lets other workers go on without waiting for this one, until its next step."""
        for server in range(self.job.num_servers):
            self.tell(server, "pause")

    def exchange(
        self, name: str, value: Any = None, awaited: Literal["nobody", "first", "all"] = "nobody"
    ) -> list[Any]:
        """Tells the others this worker's value of a name, and waits for that of worker 0, or of all that are there.

        Returns:
            On worker 0 the newest values of all that have told one, in the order of workers; else that of worker 0.
        """
        with self._waits() if awaited == "all" else contextlib.nullcontext():
            return list(self.ask(0, "tell", name, value, awaited)())
