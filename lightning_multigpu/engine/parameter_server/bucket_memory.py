"""Memory that a server shares with a worker of its host; sockets carry none of the gradients and weights in it.

::

    worker   .grad -- copied --> [ pushed ]               [ weights ] -- copied --> parameters
    .............................    |   .......................^.............................
    server                           +---> average, update -----+

The server makes the memory. The same frames travel over the connection as without shared memory, with the field
``in_memory`` in place of a payload. The receiver of a frame may then read the memory; its sender does not write there
until the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_multigpu.communication.shared_memory.segment import OfferedSegment

_ALIGNMENT_BYTES = 64


class BucketMemory(NamedTuple):
    """The memory of one bucket, uint8: the gradients that a worker pushes, or the average that it gets; the weights.

    Workers push into memory of their own. Synchronous workers read the server's own weights, and asynchronous ones a
    copy each.
    """

    pushed: Tensor
    weights: Tensor


def segment_for(sizes: Sequence[int]) -> OfferedSegment:
    """Memory for buckets of these sizes in bytes.

    Raises:
        OSError: there is no such memory.
    """
    return OfferedSegment(sum(map(_aligned, sizes)))


def cut(memory: Tensor, sizes: Iterable[int]) -> list[Tensor]:
    """The memory of each bucket in that of a segment."""
    found, start = [], 0
    for size in sizes:
        found.append(memory[start : start + size])
        start += _aligned(size)
    return found


def copy_in(parts: Iterable[memoryview], memory: Tensor) -> None:
    """Copies bytes into memory, one part after the other."""
    start = 0
    for part in parts:
        if part.nbytes:
            memory[start : start + part.nbytes].copy_(torch.frombuffer(part, dtype=torch.uint8))
            start += part.nbytes


def copy_out(memory: Tensor, parts: Iterable[memoryview]) -> None:
    """The inverse of :func:`copy_in`."""
    start = 0
    for part in parts:
        if part.nbytes:
            torch.frombuffer(part, dtype=torch.uint8).copy_(memory[start : start + part.nbytes])
            start += part.nbytes


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
