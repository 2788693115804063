"""Coordination of asynchronous workers by the first server: their batches, the beginning and the end of training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_multigpu.engine.parameter_server.servers import Answer, Servers

_Question = tuple[int, int, int, int | None]


class Coordination:
    """This worker's side of the first server's :class:`~.batch_queue.BatchQueue`.

    Attributes:
        is_exhausted: the run has no more batches for this worker, which may have some that it has yet to train on.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._asked: tuple[_Question, Answer] | None = None
        self.is_exhausted = False

    def start(self) -> None:
        """Waits until worker 0 begins to train; by then worker 0 has loaded its checkpoint."""
        self._servers.ask(0, "start").get()

    def next_batch(self, epoch: int, *, first: int, num_batches: int, limit: int | None) -> int | None:
        """The number of the next batch for this worker; None at the end of the epoch.

        Worker 0 waits while other workers have batches of the epoch, and gets those of workers that are lost. So the
        epoch has been trained by all when worker 0 comes to its end. ``first`` is the first batch that is left of the
        epoch, ``limit`` how many batches the run may take.
        """
        question = epoch, first, num_batches, limit
        asked, self._asked = self._asked, None
        answer = self._ask(question, waits=False) if asked is None else asked[1]
        number, is_over, may_return = answer.get()
        if asked is not None and asked[0] != question:  # of an epoch that has been given back
            number, is_over, may_return = self._ask(question, waits=False).get()
        if may_return:
            with self._waits():
                self.pause()
                number, is_over, _ = self._ask(question, waits=True).get()
        self.is_exhausted = is_over
        return None if number is None else int(number)

    def ask_ahead(self, epoch: int, *, first: int, num_batches: int, limit: int | None) -> None:
        """Asks for what :meth:`next_batch` of the same arguments returns, so that the answer comes meanwhile."""
        if self._asked is None:
            question = epoch, first, num_batches, limit
            self._asked = question, self._ask(question, waits=False)

    def _ask(self, question: _Question, *, waits: bool) -> Answer:
        return self._servers.ask(0, "next", *question, waits)

    def trained(self, epoch: int, number: int) -> None:
        """Reports that this worker's gradients of a batch are in the weights."""
        self._servers.tell(0, "trained", epoch, number)

    def give_back(self, epoch: int) -> None:
        """Reports that this worker trains on no further batch of the epoch."""
        self._servers.tell(0, "give back", epoch)

    @property
    def is_stopped(self) -> bool:
        """True once worker 0 has stopped training: this worker leaves the batches that it has."""
        return self._servers.is_stopped

    def stop(self, *, epoch: int, at_once: bool) -> None:
        """On worker 0: has all workers end after an epoch, or after their present batch, and waits until they have."""
        with self._waits():
            self._servers.ask(0, "stop", epoch, at_once).get()

    @contextmanager
    def _waits(self) -> Iterator[None]:
        """Within the block this worker waits for other workers; a hang report names them."""
        meter = self._servers.meter
        start_s = meter.now()
        with meter.begin("barrier", group="servers", group_size=self._servers.job.num_workers, size_bytes=0):
            yield
        meter.waited(start_s, meter.now())

    def pause(self) -> None:
        """Lets other workers go on without waiting for this one, until its next step."""
        for server in range(self._servers.job.num_servers):
            self._servers.tell(server, "pause")

    def end(self, message: Any) -> Any:
        """Ends training: worker 0 sends all others a value, which they wait for."""
        given = self._servers.ask(0, "over", message if self._servers.worker == 0 else None).get()
        return message if self._servers.worker == 0 else given

    def newest(self, name: str, value: Any, *, of_all: bool) -> list[Any]:
        """On worker 0 the newest value that each worker has passed under a name; on others their own alone.

        With ``of_all`` worker 0 waits until all workers that are there have passed one since it last did so.
        """
        return list(self._servers.ask(0, "tell", name, value, of_all).get())
