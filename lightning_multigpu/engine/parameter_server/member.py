"""A worker's connection, as a parameter server sees it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_multigpu.communication.channel import Channel, ChannelError
from lightning_multigpu.communication.checksums import bytes_of
from lightning_multigpu.engine.parameter_server.bucket_memory import BucketMemory
from lightning_multigpu.engine.parameter_server.wire import (
    packed,
)


@dataclass(eq=False)
class Member:
    """A worker's connection, and what is to be sent over it.

    ``requests`` is a second connection of a worker on another host, for messages that must not wait behind gradients.
    ``memory`` is that of the buckets, by number of their optimizer and their own, which a worker of this host shares;
    ``memory_in`` and ``memory_out`` count the bytes that went through it.
    """

    worker: int
    channel: Channel
    requests: Channel | None = None
    shares_memory: bool = False
    memory: dict[tuple[int, int], BucketMemory] = field(default_factory=dict)
    memory_in: int = 0
    memory_out: int = 0
    outbox: queue.SimpleQueue[tuple[dict[str, Any], Sequence[memoryview]] | None] = field(
        default_factory=queue.SimpleQueue
    )

    def __post_init__(self) -> None:
        self.writer = threading.Thread(target=self._write, name=f"to worker {self.worker}", daemon=True)

    def shut_down(self) -> None:
        """Ends the connections for both ends."""
        self.channel.shut_down()
        if self.requests is not None:
            self.requests.shut_down()

    def post(self, fields: dict[str, Any], payload: Sequence[memoryview] = ()) -> None:
        """Sends a frame when those before it are sent; the payload stays as it is until then."""
        self.outbox.put((fields, payload))

    def post_value(self, fields: dict[str, Any], value: Any, what: str) -> None:
        """Sends a frame with a value that :func:`packed` takes."""
        tensors: list[Tensor] = []
        body = packed(value, tensors, what=what)
        self.post({**fields, "body": body}, [bytes_of(tensor) for tensor in tensors])

    def _write(self) -> None:
        """Sends all that is posted, until None is."""
        while (frame := self.outbox.get()) is not None:
            try:
                self.channel.send(*frame)
            except ChannelError:  # the thread that reads reports it
                return
