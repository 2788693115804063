"""The memory of a bucket between a worker and a server, for gradients that are pushed and weights that are pulled.

::

    worker   .grad -- copied --> [ pushed ]               [ pulled ] -- copied --> parameters
    .............................    |   .......................^............................
    server                           +---> average, update -----+

On one host both ends map the same memory. Otherwise each end has its own, and sockets copy it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_multigpu.communication.shared_memory.segment import OfferedSegment
from lightning_multigpu.engine.parameter_server.pair import Pair

_ALIGNMENT_BYTES = 64


@dataclass(eq=False)
class Room:
    """One end of a bucket's memory.

    Args:
        pair: the worker and the server.
        number: of the bucket, in the job.
        pushed: for gradients, flat.
        pulled: for weights, flat.
    """

    pair: Pair
    number: int
    pushed: Tensor
    pulled: Tensor

    def __post_init__(self) -> None:
        self._expected: Any = None

    # The worker's end

    def push(self) -> None:
        """Sends the gradients in :attr:`pushed`."""
        with self.pair.failing():
            self.pair.isend(self.pushed, self.number).wait()

    def expect_pull(self) -> None:
        """Begins to wait for weights, before gradients are pushed: servers send nothing until they know.

        On the connection the word for that would wait behind gradients.
        """
        self._expected = self.pair.irecv(self.pulled, self.number)

    def await_pull(self) -> Tensor:
        """Waits for weights; when they were used, :meth:`expect_pull` is called again."""
        with self.pair.failing():
            self._expected.wait()
        return self.pulled

    # The server's end

    def expect_push(self) -> None:
        """Begins to wait for gradients, unless it waits already: a worker's connection takes them only from then on."""
        if self._expected is None:
            self._expected = self.pair.irecv(self.pushed, self.number)

    def take_pushes(self, count: int) -> None:
        """Waits for the last of so many pushes, each of which takes the place of the one before."""
        for _ in range(count):
            self.expect_push()
            with self.pair.failing():
                self._expected.wait()
            self._expected = None
            self.pair.bytes_in += self.pushed.nbytes

    def pull(self, tensor: Tensor) -> Any:
        """Begins to send weights, or tells that they are in memory; returns the transfer."""
        self.pair.bytes_out += tensor.nbytes
        return self.pair.isend(tensor, self.number)


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
