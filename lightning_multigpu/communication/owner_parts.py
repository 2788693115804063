"""Flat tensors of which every rank owns a part: sums travel to the owners, and values from the owners to all ranks.

All owners' parts travel at once, so that links carry as much in both directions (here two ranks)::

    reduce    rank 0   [ a0 | b0 ] --b0--> rank 1      rank 0 has A, the sum of a0 and a1
              rank 1   [ a1 | b1 ] --a1--> rank 0      rank 1 has B
    gather    rank 0   [ A' |  - ] --A'--> rank 1      both have A', B'
              rank 1   [ -  | B' ] --B'--> rank 0

Source: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce, SentBytes
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.records import Transfer

_END_S = 5.0
MOST = 8
"""A bucket has at most so many times the bytes that it has to have of each rank, where it has too few of one rank."""


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype and device that travel together, those of each owner one after the other.

    Attributes:
        members: in their order in flat memory.
        bounds: first and one-past-last element of each owner's part, in the order of :attr:`OwnerParts.order`.
        own: the members that this rank owns, and their part.
    """

    members: list[Tensor]
    bounds: list[tuple[int, int]]
    own: tuple[list[Tensor], slice]


def split(flat: Tensor, members: Sequence[Tensor]) -> list[Tensor]:
    """The places of tensors in flat memory, in their shapes."""
    parts = flat.split_with_sizes([member.numel() for member in members])
    return [part.view(member.shape) for part, member in zip(parts, members, strict=True)]


class OwnerParts:
    """Moves buckets between the ranks of a group; all ranks make the same calls in the same order.

    Args:
        group: the ranks; its meter records every bucket.
        all_reduce: over the same ranks, in the hosts' memory; None for the collectives of the group's back end.
    """

    def __init__(self, group: MeteredGroup, all_reduce: HierarchicalAllReduce | None) -> None:
        self._group, self._all_reduce = group, all_reduce
        self._order = [*range(group.size)] if all_reduce is None else all_reduce.order
        self._jobs: SimpleQueue[tuple[Future[Tensor], Callable[[], Tensor]] | None] = SimpleQueue()
        # A daemon: Gloo may leave a thread waiting for a transfer that its connection's end has cut short.
        self._thread = threading.Thread(target=self._work, name="owner-parts", daemon=True)
        if all_reduce is not None:
            self._thread.start()

    def bucket(self, tensors: Sequence[Tensor], owners: Mapping[Tensor, int]) -> Bucket:
        """Arranges tensors by their owners, ranks of the group."""
        of_rank: list[list[Tensor]] = [[] for _ in self._order]
        for tensor in tensors:
            of_rank[owners[tensor]].append(tensor)
        ends = [0, *accumulate(sum(tensor.numel() for tensor in of_rank[rank]) for rank in self._order)]
        bounds = [*pairwise(ends)]
        start, end = bounds[self._order.index(self._group.rank)]
        members = [tensor for rank in self._order for tensor in of_rank[rank]]
        return Bucket(members, bounds, (of_rank[self._group.rank], slice(start, end)))

    def reduce(self, bucket: Bucket, flat: Tensor, *, to_all: bool = False) -> Callable[[], Tensor]:
        """Begins to average a flat tensor, which the caller forgets.

        Returns:
            What waits for the averages: those of this rank's part alone, or all on all ranks.
        """
        part = slice(None) if to_all else bucket.own[1]
        if self._all_reduce is None:
            wait = self._by_back_end("all_reduce" if to_all else "reduce", bucket, flat.div_(self._group.size))
            return lambda: wait()[part].clone()
        if to_all:
            sent = self._all_reduce.plan(flat, average=True).sent if flat.numel() else SentBytes(0, 0)
            return self._beside("all_reduce", flat, sent, partial(self._all_reduce, average=True), part)
        sent, move = self._all_reduce.sent_parts(bucket.bounds, flat.itemsize)[0], self._all_reduce.reduce_scatter
        return self._beside("reduce_scatter", flat, sent, partial(move, bounds=bucket.bounds, average=True), part)

    def gather(self, bucket: Bucket, flat: Tensor) -> Callable[[], Tensor]:
        """Begins to give all ranks each rank's part; returns what waits for the tensor with all parts."""
        if self._all_reduce is None:
            return self._by_back_end("broadcast", bucket, flat)
        sent, move = self._all_reduce.sent_parts(bucket.bounds, flat.itemsize)[1], self._all_reduce.all_gather
        return self._beside("all_gather", flat, sent, partial(move, bounds=bucket.bounds), slice(None))

    def _beside(
        self, operation: str, flat: Tensor, sent: SentBytes, move: Callable[[Tensor], object], part: slice
    ) -> Callable[[], Tensor]:
        """Has this object's thread move a tensor in the host's memory, of which a part is kept."""
        transfer = self._group.begin(operation, flat.nbytes, sent_bytes=sum(sent), memory_bytes=sent.memory)
        moved, device, host = Future[Tensor](), flat.device, flat.cpu()

        def work() -> Tensor:
            with transfer:
                move(host)
            return host if part == slice(None) else host[part].clone()  # the rest is freed

        self._jobs.put((moved, work))
        return lambda: moved.result().to(device)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            moved, work = job
            try:
                moved.set_result(work())
            except BaseException as error:
                moved.set_exception(error)
            del job, work  # and the memory of the tensor

    def _by_back_end(self, operation: str, bucket: Bucket, flat: Tensor) -> Callable[[], Tensor]:
        works: list[tuple[Any, Transfer]] = []
        group, ranks = self._group, self._group.ranks
        parts = [(rank, flat[a:b]) for rank, (a, b) in zip(self._order, bucket.bounds, strict=True) if b > a]
        for rank, part in [(group.rank, flat)] if operation == "all_reduce" else parts:
            sends = operation == "all_reduce" or (rank == group.rank) == (operation == "broadcast")
            described = {} if sends else {"sent_bytes": 0}
            transfer = group.begin(operation, part.nbytes, on_stream=flat.is_cuda, **described)
            work: Any
            if operation == "all_reduce":
                work = dist.all_reduce(part, group=group.group, async_op=True)
            elif operation == "reduce":
                work = dist.reduce(part, ranks[rank], group=group.group, async_op=True)
            else:
                work = dist.broadcast(part, ranks[rank], group=group.group, async_op=True)
            works.append((work, transfer))

        def wait() -> Tensor:
            for work, transfer in works:
                with transfer:
                    work.wait()
            return flat

        return wait

    def close(self) -> None:
        """Ends the thread, and frees what ranks of a host share."""
        if self._all_reduce is not None:
            self._jobs.put(None)
            self._thread.join(timeout=_END_S)
            self._all_reduce.close()
