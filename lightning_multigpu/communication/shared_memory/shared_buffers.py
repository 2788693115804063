"""Buffers that ranks of one host share, and the stages that move the chunks of a tensor through them.

The time between two barriers is an interval; ranks read in one interval what others wrote in the interval before. In
each interval a rank works on several chunks, each in a different stage. With three stages (chunks a, b, c)::

    interval      0         1         2         3         4
    stage 0       a         b         c
    stage 1                 a         b         c
    stage 2                           a         b         c

No other rank reads the last stage's result, so a rank arrives at the barrier before that stage and waits after it.
Therefore a fast rank may write for interval ``t + 2`` while a slow one still reads from ``t``: there are three buffers,
used in turn. No barrier is needed between two tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.shared_memory.barrier import Barrier
from lightning_multigpu.communication.shared_memory.segment import SharedMemoryUnavailableError, SharedSegment

_BUFFERS = 3
_ALIGNMENT_BYTES = 64
_VIEWS_KEPT = 512  # slicing takes longer than copying a small tensor

Stage = Callable[[int], object]
"""A rank's work on the chunk with the given number."""


class SharedBuffers:
    """Buffers shared by the ranks of ``group``. The constructor is a collective, and reserves the memory.

    ``chunk_bytes``, 64 or more a rank, limits a slot's size; a buffer has a slot for each rank, and one for sums.

    Raises:
        SharedMemoryUnavailableError: the ranks cannot share memory; all ranks raise.
    """

    def __init__(self, group: dist.ProcessGroup, *, chunk_bytes: int, timeout_s: float) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.chunk_bytes = chunk_bytes - chunk_bytes % (_ALIGNMENT_BYTES * self.world_size)
        self._interval = 0
        shape = (_BUFFERS, self.world_size + 1, self.chunk_bytes)
        barrier_bytes = Barrier.size_bytes(self.world_size)
        self._segment = SharedSegment(group, barrier_bytes + shape[0] * shape[1] * shape[2])
        assert self._segment.memory is not None
        memory = self._segment.memory
        try:
            self._barrier: Barrier | None = Barrier(
                memory[:barrier_bytes].numpy(),
                rank=self.rank,
                world_size=self.world_size,
                names=dist.get_process_group_ranks(group),
                is_gone=self._segment.is_gone,
                timeout_s=timeout_s,
            )
        except OSError as error:  # a function is missing in the system's library, which all ranks of a host share
            self._segment.close()
            raise SharedMemoryUnavailableError(str(error)) from error
        if self.rank == 0:
            self._barrier.initialise()
        dist.barrier(group=group)
        self._buffers: Tensor | None = memory[barrier_bytes:].view(shape)
        self._views: dict[tuple[int, int, int, torch.dtype], tuple[Tensor, ...]] = {}

    def run(self, num_chunks: int, *stages: Stage) -> None:
        """Moves every chunk through all stages, one stage in each interval.

        Any exception of a rank aborts the barrier: the other ranks would wait for that rank.

        Raises:
            ConnectionLostError: another rank has ended, :meth:`abort` was called, or the time is up.
            RuntimeError: the buffers are closed.
        """
        if self.world_size == 1 or num_chunks == 0:
            return
        barrier = self._barrier
        if barrier is None:
            raise RuntimeError(_CLOSED)
        *writing, last = stages
        lag = len(writing)
        try:
            for interval in range(num_chunks + lag):
                for stage, work in enumerate(writing):
                    if 0 <= interval - stage < num_chunks:
                        work(interval - stage)
                ends = interval == num_chunks + lag - 1
                if not ends:
                    barrier.arrive()
                if interval >= lag:
                    last(interval - lag)
                if not ends:
                    barrier.wait()
                    self._interval += 1
        except BaseException:
            barrier.abort()
            raise

    def rows(self, age: int, start: int, like: Tensor) -> tuple[Tensor, ...]:
        """Elements from ``start`` on of each rank's slot, and of the slot for sums, which comes last.

        Args:
            age: 0 for the buffer of this interval, 1 for the buffer of the interval before.
            start: in elements of ``like``.
            like: its number of elements and dtype are the result's.
        """
        key = ((self._interval - age) % _BUFFERS, start, like.numel(), like.dtype)
        rows = self._views.get(key)
        if rows is None:
            if self._buffers is None:
                raise RuntimeError(_CLOSED)
            if len(self._views) == _VIEWS_KEPT:
                self._views.clear()
            buffer = self._buffers[key[0]].view(like.dtype)
            rows = self._views[key] = buffer[:, start : start + like.numel()].unbind()
        return rows

    def limit(self, timeout_s: float) -> None:
        """Sets the seconds that this rank waits for the others from now on."""
        if self._barrier is not None:
            self._barrier.timeout_s = timeout_s

    def abort(self) -> None:
        """Makes every rank that is in :meth:`run`, or calls it later, raise; any thread may call this at any time."""
        barrier = self._barrier
        if barrier is not None:
            barrier.abort()

    def close(self) -> None:
        """Releases the memory; ranks that still wait for this one raise. A second call does nothing."""
        self._barrier = None
        self._buffers = None
        self._views.clear()
        self._segment.close()


_CLOSED = "the shared memory of this group is closed"
