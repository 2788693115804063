"""Ring all-reduce: reduce-scatter, then all-gather, between neighbours.

The tensor is cut into one chunk for each rank. In N-1 steps each chunk is sent once around the ring and summed on the
way; in N-1 further steps the sums are sent once around. With N = 3 (chunks a, b, c; capitals are complete sums)::

              rank 0            rank 1            rank 2
    start     a0 b0 c0          a1 b1 c1          a2 b2 c2
    reduce    --a0--> 1         --b1--> 2         --c2--> 0
              --c0+c2--> 1      --a0+a1--> 2      --b1+b2--> 0
    holds     B                 C                 A
    gather    --B--> 1          --C--> 2          --A--> 0
              --A--> 1          --B--> 2          --C--> 0

Every rank sends 2(N-1)/N of the tensor, whatever N is. All ranks get the same bits, because each sum is made once, on
one rank, in one order.

Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of
Parallel and Distributed Computing 69 (2009), section 4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.tensors import check_reducible

DEFAULT_SEGMENT_BYTES = 1 << 20
"""Chunks are sent in segments of this size: one is summed in cache while the next arrives."""

Phase = Literal["reduce", "gather"]
REDUCE: tuple[Phase, ...] = ("reduce",)
GATHER: tuple[Phase, ...] = ("gather",)

_TAG = 8  # and 9: tensors use them in turn. lightning_multigpu.communication.compression uses lower ones

_AHEAD = 2
"""Segments that are sent at first; then one is sent for each that arrives. More would only queue before a slow link,
where replies have to wait too."""


@dataclass(frozen=True)
class RingStep:
    """One step of one rank: send one chunk to the next rank, receive another one from the previous rank."""

    phase: Phase
    send: int
    receive: int


def ring_steps(rank: int, world_size: int) -> Iterator[RingStep]:
    """The steps of ``rank`` in an all-reduce over ``world_size`` ranks, in order.

    Every step after the first sends the chunk that the step before has received. After the ``reduce`` steps the rank
    holds the complete sum of chunk ``(rank + 1) % world_size``.
    """
    for step in range(world_size - 1):
        yield RingStep("reduce", send=(rank - step) % world_size, receive=(rank - step - 1) % world_size)
    for step in range(world_size - 1):
        yield RingStep("gather", send=(rank + 1 - step) % world_size, receive=(rank - step) % world_size)


def chunk_bounds(numel: int, num_chunks: int) -> list[tuple[int, int]]:
    """First and one-past-last element of each chunk; sizes differ by at most one element, larger ones first."""
    size, larger = divmod(numel, num_chunks)
    starts = [index * size + min(index, larger) for index in range(num_chunks + 1)]
    return list(pairwise(starts))


def sent_elements(numel: int, rank: int, world_size: int) -> int:
    """Elements that ``rank`` sends in an all-reduce of ``numel`` elements: 2(N-1)/N of them where N divides numel."""
    bounds = chunk_bounds(numel, world_size)
    return sum(bounds[step.send][1] - bounds[step.send][0] for step in ring_steps(rank, world_size))


class Messages:
    """Point-to-point messages over a process group.

    Attributes:
        timeout: the longest wait for one; 0 for the group's at its creation, which Gloo keeps.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.timeout = timedelta(0)
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._ranks = dist.get_process_group_ranks(group)

    @property
    def peers(self) -> list[int]:
        """The other ranks of the group, the next one first, so that not all send to the same rank at once."""
        return [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]

    def send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Starts to send; the tensor must not change until the work is done."""
        work = dist.isend(tensor, self._ranks[peer], group=self.group, tag=tag)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Starts to receive; the message is in the tensor when the work is done."""
        work = dist.irecv(tensor, self._ranks[peer], group=self.group, tag=tag)
        assert work is not None
        return work

    def wait(self, work: dist.Work) -> None:
        """Waits for a message; RuntimeError if the other rank has ended, or the time is up."""
        work.wait(self.timeout)


class RingAllReduce:
    """Sums or averages CPU tensors over the ranks of a group; each rank sends to its neighbour only.

    All ranks of the group must call it in the same order, one call at a time; which thread calls does not matter.

    Args:
        group: a process group whose backend sends CPU tensors point to point (gloo, mpi); nothing else may use it
            for messages while a call is under way.
        segment_bytes: the most bytes in one message.
    """

    def __init__(self, group: dist.ProcessGroup, *, segment_bytes: int = DEFAULT_SEGMENT_BYTES) -> None:
        self.messages = Messages(group)
        self.rank, self.world_size = self.messages.rank, self.messages.world_size
        self.segment_bytes = segment_bytes
        self._tag = 0
        self._scratch: dict[tuple[torch.dtype, int], Tensor] = {}

    def sent_bytes(self, tensor: Tensor) -> int:
        """Bytes that this rank sends when ``tensor`` is reduced."""
        return sent_elements(tensor.numel(), self.rank, self.world_size) * tensor.element_size()

    def scratch(self, dtype: torch.dtype, numel: int, tag: int, step: int) -> Tensor:
        """One of two buffers for arriving segments: one step's are summed while the next step's arrive."""
        memory = self._scratch.get((dtype, tag))
        if memory is None or memory.numel() < 2 * numel:
            memory = self._scratch[dtype, tag] = torch.empty(2 * numel, dtype=dtype)
        return memory[: 2 * numel].view(2, numel)[step % 2]

    def __call__(self, tensor: Tensor, *, average: bool = False) -> Tensor:
        """Reduces ``tensor`` in place and returns it.

        Args:
            tensor: any shape, contiguous, on the CPU; the same shape and dtype on every rank.
            average: divide the sums by the number of ranks; needs a floating-point or complex dtype.

        Raises:
            ValueError: the tensor is not on the CPU, not contiguous, or an average of integers is asked for.
            RuntimeError: a neighbour has ended, or the group's timeout has passed.
        """
        return self.begin(tensor, average=average)()

    def begin(
        self,
        tensor: Tensor,
        *,
        average: bool = False,
        phases: Collection[Phase] = REDUCE + GATHER,
        bounds: Sequence[tuple[int, int]] | None = None,
    ) -> Callable[[], Tensor]:
        """As a call, but returns when the first segments are being sent; the result does the rest.

        One more tensor may begin before the earlier one is finished, so that the network is not idle between the two.
        Tensors must be finished in the order in which they began.

        Args:
            phases: "reduce" alone gives each rank the sums of its chunk, "gather" alone all ranks the chunks of all.
            bounds: first and one-past-last element of each rank's chunk; they may be empty. By default chunks are as
                even as possible, and rank r has chunk r + 1.
        """
        check_reducible(tensor, "the ring", average=average)
        self._tag = 1 - self._tag
        if bounds is None:
            bounds = chunk_bounds(tensor.numel(), self.world_size)
        else:
            bounds = [bounds[(chunk - 1) % self.world_size] for chunk in range(self.world_size)]
        return _PendingRing(self, tensor, average, self._tag, phases, bounds).finish


class _PendingRing:
    """A tensor that is being reduced."""

    def __init__(
        self,
        ring: RingAllReduce,
        tensor: Tensor,
        average: bool,
        tag: int,
        phases: Collection[Phase],
        bounds: Sequence[tuple[int, int]],
    ) -> None:
        self._ring = ring
        self._tensor = tensor
        self._average = average
        self._tag = tag
        self._flat = tensor.detach().view(-1)
        self._steps = [step for step in ring_steps(ring.rank, ring.world_size) if step.phase in phases]
        if not self._steps:
            return
        self._bounds = bounds
        self._waiting = deque(self._flat[a:b] for a, b in self._segments(self._bounds[self._steps[0].send]))
        self._posted = self._post(0)
        self._sends = [self._send(self._waiting.popleft()) for _ in range(min(_AHEAD, len(self._waiting)))]

    def finish(self) -> Tensor:
        """Waits for the other ranks; returns the tensor, now the sum or the average. Call it once.

        Raises:
            RuntimeError: a neighbour has ended, or the group's timeout has passed.
        """
        if not self._steps:
            return self._tensor
        world_size = self._ring.world_size
        for index, step in enumerate(self._steps):
            arriving, self._posted = self._posted, self._post(index + 1)
            completes = step.phase == "reduce" and index == world_size - 2
            for work, (a, b), incoming in arriving:
                self._ring.messages.wait(work)
                segment = self._flat[a:b]
                if step.phase == "reduce":
                    segment.add_(incoming)
                if completes and self._average:
                    segment.div_(world_size)
                if index + 1 < len(self._steps):
                    self._waiting.append(segment)
                if self._waiting:
                    self._sends.append(self._send(self._waiting.popleft()))
        self._sends += [self._send(segment) for segment in self._waiting]
        for work in self._sends:
            self._ring.messages.wait(work)
        return self._tensor

    def _segments(self, bounds: tuple[int, int]) -> Iterator[tuple[int, int]]:
        start, end = bounds
        size = max(1, self._ring.segment_bytes // self._flat.element_size())
        return ((a, min(a + size, end)) for a in range(start, end, size))

    def _post(self, index: int) -> deque[tuple[dist.Work, tuple[int, int], Tensor]]:
        """Posts the receives of one step ahead of time: segments to be summed go to scratch memory."""
        posted: deque[tuple[dist.Work, tuple[int, int], Tensor]] = deque()
        if index >= len(self._steps):
            return posted
        step = self._steps[index]
        start, end = self._bounds[step.receive]
        for a, b in self._segments((start, end)):
            if step.phase == "reduce":
                half = max(b - a for a, b in self._bounds)
                incoming = self._ring.scratch(self._flat.dtype, half, self._tag, index)[a - start : b - start]
            else:
                incoming = self._flat[a:b]
            posted.append((self._receive(incoming), (a, b), incoming))
        return posted

    def _send(self, segment: Tensor) -> dist.Work:
        ring = self._ring
        return ring.messages.send(segment, (ring.rank + 1) % ring.world_size, _TAG + self._tag)

    def _receive(self, segment: Tensor) -> dist.Work:
        ring = self._ring
        return ring.messages.receive(segment, (ring.rank - 1) % ring.world_size, _TAG + self._tag)
