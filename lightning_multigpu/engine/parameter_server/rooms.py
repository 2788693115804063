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

import torch
from torch import Tensor

from lightning_multigpu.communication.compression.compressors import ElementwiseCompressor
from lightning_multigpu.communication.shared_memory.segment import OfferedSegment
from lightning_multigpu.engine.parameter_server.pair import Pair

_ALIGNMENT_BYTES = 64


@dataclass(eq=False)
class Room:
    """One end of a bucket's memory.

    Args:
        pair: the worker and the server.
        number: of the bucket, in the job.
        memory: for pushed gradients, compressed or not: :func:`room_bytes` of uint8.
        pulled: for weights, flat.
        compressor: of pushed gradients, if they are float32 as the weights; None to push them as they are.
    """

    pair: Pair
    number: int
    memory: Tensor
    pulled: Tensor
    compressor: ElementwiseCompressor | None

    def __post_init__(self) -> None:
        if self.pulled.dtype != torch.float32:
            self.compressor = None
        compressed = None if self.compressor is None else self.compressor.encoded_bytes(self.pulled.numel())
        self.wire_bytes = self.pulled.nbytes if compressed is None else compressed
        self._expected: Any = None

    @property
    def wire(self) -> Tensor:
        """Gradients as they are pushed, uint8."""
        return self.memory[: self.wire_bytes]

    @property
    def pushed(self) -> Tensor:
        """Gradients that are not compressed, or averages; as :attr:`pulled`."""
        return self.memory[: self.pulled.nbytes].view(self.pulled.dtype)

    # The worker's end

    def push(self, *, is_whole: bool) -> None:
        """Sends the gradients in :attr:`wire`, or those in :attr:`pushed`, which are averages already."""
        what = self.pushed if is_whole else self.wire
        with self.pair.failing():
            self.pair.isend(what, 2 * self.number + is_whole).wait()

    def expect_pull(self) -> None:
        """Begins to wait for weights or averages, before gradients are pushed: servers send nothing until they know.

        On the connection the word for that would wait behind gradients.
        """
        self._expected = self.pair.irecv(self.pulled, 2 * self.number)

    def await_pull(self, *, averages: bool) -> Tensor:
        """Waits for weights, or averages; when they were used, :meth:`expect_pull` is called again."""
        with self.pair.failing():
            self._expected.wait()
        return self.pushed if averages and self.pair.shares_memory else self.pulled

    # The server's end

    def expect_push(self) -> None:
        """Begins to wait for gradients, unless it waits already: a worker's connection takes them only from then on."""
        if self._expected is None:
            self._expected = self.pair.irecv(self.wire, 2 * self.number)

    def take_pushes(self, count: int) -> None:
        """Waits for the last of so many pushes, each of which takes the place of the one before."""
        for _ in range(count):
            self.expect_push()
            with self.pair.failing():
                self._expected.wait()
            self._expected = None
            self.pair.bytes_in += self.wire_bytes

    def take_whole(self) -> None:
        """Waits for gradients that are the workers' average already."""
        with self.pair.failing():
            self.pair.irecv(self.pushed, 2 * self.number + 1).wait()
        self.pair.bytes_in += self.pushed.nbytes

    def pull(self, tensor: Tensor) -> Any:
        """Begins to send weights or averages, or tells that they are in memory; returns the transfer."""
        self.pair.bytes_out += tensor.nbytes
        return self.pair.isend(tensor, 2 * self.number)


def room_bytes(flat: Tensor, compressor: ElementwiseCompressor | None) -> int:
    """The memory for a bucket's gradients: a single element takes less than the scale of its chunk."""
    return max(flat.nbytes, 0 if compressor is None else compressor.encoded_bytes(flat.numel()))


def offered(sizes: Sequence[int]) -> tuple[OfferedSegment, list[Tensor]]:
    """Memory of these sizes in bytes that workers of this host may map, uint8."""
    segment = OfferedSegment(sum(map(_aligned, sizes)))
    return segment, [*cut(segment.memory, sizes)]


def cut(memory: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """The memory of each bucket in that of all."""
    start = 0
    for size in sizes:
        yield memory[start : start + size]
        start += _aligned(size)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
