"""Coordination of asynchronous workers by the first server: their batches, the beginning and the end of training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_multigpu.engine.parameter_server.server_connections import Fields, ServerConnections
from lightning_multigpu.engine.parameter_server.wire import unpacked

_FIRST = (0,)


class Coordination:
    """This worker's side of the first server's :class:`~.batch_queue.BatchQueue`.

    Args:
        servers: the connections of this worker.

    Attributes:
        is_exhausted: the run has no more batches for this worker, which may have some that it has yet to train on.
    """

    def __init__(self, servers: ServerConnections) -> None:
        self._servers = servers
        self._run = 0
        self._asked: Fields | None = None
        self.is_exhausted = False

    def start(self) -> None:
        """Waits until worker 0 begins to train; by then worker 0 has loaded its checkpoint."""
        self._run += 1
        self._servers.is_stopped = self.is_exhausted = False
        if self._servers.worker == 0:
            self._servers.post(0, {"kind": "start", "run": self._run})
        else:
            self._servers.post(0, {"kind": "await start", "run": self._run})
            self._servers.answers("start", _FIRST)

    def next_batch(self, epoch: int, *, first: int, num_batches: int, limit: int | None) -> int | None:
        """The number of the next batch for this worker; None at the end of the epoch.

        Worker 0 waits while other workers have batches of the epoch, and gets those of workers that are lost. So the
        epoch has been trained by all when worker 0 comes to its end.

        Args:
            epoch: its number.
            first: the first batch that is left of the epoch.
            num_batches: of the epoch.
            limit: batches that the run may take; None for any number.
        """
        question = self._question(epoch, first, num_batches, limit)
        fields = self._answer_to(question)
        if fields["may_return"]:
            with self._waits():
                self.pause()
                fields = self._answer_to({**question, "waits": True})
        self.is_exhausted = bool(fields["is_over"])
        number = fields["number"]
        return None if number is None else int(number)

    def ask_ahead(self, epoch: int, *, first: int, num_batches: int, limit: int | None) -> None:
        """Asks for what :meth:`next_batch` of the same arguments returns, so that the answer comes meanwhile."""
        if self._asked is None:
            self._asked = self._question(epoch, first, num_batches, limit)
            self._servers.post(0, self._asked)

    def _question(self, epoch: int, first: int, num_batches: int, limit: int | None) -> Fields:
        of_epoch = {"epoch": epoch, "first": first, "num_batches": num_batches, "limit": limit}
        return {"kind": "next", "run": self._run, **of_epoch}

    def _answer_to(self, question: Fields) -> Fields:
        asked, self._asked = self._asked, None
        if asked is not None:
            ((fields, _),) = self._servers.answers("batch", _FIRST)
            if asked == question:
                return fields  # else of an epoch that has been given back
        self._servers.post(0, question)
        ((fields, _),) = self._servers.answers("batch", _FIRST)
        return fields

    def trained(self, epoch: int, number: int) -> None:
        """Reports that this worker's gradients of a batch are in the weights."""
        self._servers.post(0, {"kind": "trained", "epoch": epoch, "number": number})

    def give_back(self, epoch: int) -> None:
        """Reports that this worker trains on no further batch of the epoch."""
        self._servers.post(0, {"kind": "give back", "epoch": epoch})

    @property
    def is_stopped(self) -> bool:
        """True once worker 0 has stopped training: this worker leaves the batches that it has."""
        return self._servers.is_stopped

    def stop(self, *, epoch: int, at_once: bool) -> None:
        """On worker 0: has all workers end training, and waits until they have.

        Args:
            epoch: the last one that others train in.
            at_once: have them end within the epoch, after their present batch.
        """
        with self._waits():
            self._servers.post(0, {"kind": "stop", "epoch": -1 if at_once else epoch, "at_once": at_once})
            self._servers.answers("stopped", _FIRST)

    @contextmanager
    def _waits(self) -> Iterator[None]:
        """Within the block this worker waits for other workers; a hang report names them."""
        meter = self._servers.meter
        start_s = meter.now()
        with meter.metered("barrier", group="servers", group_size=self._servers.num_workers, size_bytes=0):
            yield
        meter.waited(start_s, meter.now())

    def pause(self) -> None:
        """Lets other workers go on without waiting for this one, until its next step."""
        for server in range(self._servers.num_servers):
            self._servers.post(server, {"kind": "pause"})

    def end(self, message: Any) -> Any:
        """Ends training: worker 0 sends all others a value of numbers, texts and tensors, which they wait for."""
        if self._servers.worker == 0:
            self._servers.post_value(0, {"kind": "over"}, message, "worker 0's last message")
            return message
        self._servers.post(0, {"kind": "await over"})
        ((fields, tensors),) = self._servers.answers("over", _FIRST)
        return unpacked(fields["body"], tensors)

    def newest(self, name: str, value: Any, *, of_all: bool) -> list[Any]:
        """On worker 0 the newest value that each worker has passed under a name; on others their own alone.

        Args:
            name: of the value.
            value: what JSON can express.
            of_all: worker 0 waits until all workers that are there have passed one since it last did so.
        """
        self._servers.post(0, {"kind": "tell", "name": name, "value": value})
        if self._servers.worker != 0:
            return [value]
        self._servers.post(0, {"kind": "told", "name": name, "of_all": of_all})
        ((fields, _),) = self._servers.answers("told", _FIRST)
        return list(fields["values"])
