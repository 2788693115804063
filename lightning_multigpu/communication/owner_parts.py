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
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, islice, pairwise
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu._torch_compat import flattened, unflattened
from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce, SentBytes
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.records import Transfer
from lightning_multigpu.communication.shared_memory.host_all_reduce import SharedMemoryAllReduce

_END_S = 5.0
_LARGE_BYTES = 1 << 18
"""Within a host larger tensors travel from where they are; smaller ones are copied into one."""
MOST = 8
"""A bucket has at most so many times the bytes that it has to have of each rank, where it has too few of one rank."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Tensors of one dtype and device that travel together, those of each owner one after the other.

    Attributes:
        parts: the tensors of each rank, large ones last, in the order of :attr:`OwnerParts.order`.
        members: those of all parts.
        bounds: first and one-past-last element of each part in flat memory.
        own: the members that this rank owns, and their part.
    """

    parts: list[list[Tensor]]
    members: list[Tensor]
    bounds: list[tuple[int, int]]
    own: tuple[list[Tensor], slice]


def split(flat: Tensor, members: Sequence[Tensor]) -> Sequence[Tensor]:
    """The places of tensors in flat memory, in their shapes."""
    return unflattened(flat, members)


def _is_large(tensor: Tensor) -> bool:
    return tensor.nbytes > _LARGE_BYTES


def _flats(tensors: Sequence[Tensor], *, are_read: bool = True) -> list[Tensor]:
    """The values of tensors, large ones last, in flat tensors of the host: of small ones in one copy.

    A large one lies where it is, if that is in the host's memory and contiguous. Without ``are_read`` other values may
    be in the copies.
    """
    num_small = bisect_left(tensors, True, key=_is_large)
    small, found = tensors[:num_small], [large.reshape(-1) for large in tensors[num_small:]]
    if small and are_read:
        found.insert(0, flattened(small))
    elif small:
        found.insert(0, small[0].new_empty(sum(each.numel() for each in small)))
    return [flat.cpu() for flat in found]


def _fill(tensors: Sequence[Tensor], flats: Sequence[Tensor]) -> None:
    """Gives tensors the values that their :func:`_flats` have now."""
    num_joined = len(tensors) - len(flats) + 1
    joined, large = split(flats[0], tensors[:num_joined]), zip(flats[1:], tensors[num_joined:], strict=True)
    values = [*joined, *(flat.view(each.shape) for flat, each in large)]
    pairs = zip(tensors, values, strict=True)
    news = [(each, value) for each, value in pairs if value.data_ptr() != each.data_ptr()]
    if news:
        torch._foreach_copy_([each for each, _ in news], [value for _, value in news])


class OwnerParts:
    """Moves buckets between the ranks of a group; all ranks make the same calls in the same order.

    Args:
        group: the ranks; its meter records every bucket.
        all_reduce: over the same ranks, in the hosts' memory; None for the collectives of the group's back end.
    """

    def __init__(self, group: MeteredGroup, all_reduce: HierarchicalAllReduce | None) -> None:
        self._group, self._all_reduce = group, all_reduce
        self._order = [*range(group.size)] if all_reduce is None else all_reduce.order
        self._jobs: SimpleQueue[tuple[Future[Any], Transfer, Callable[[], Any]] | None] = SimpleQueue()
        # A daemon: Gloo may leave a thread waiting for a transfer that its connection's end has cut short.
        self._thread = threading.Thread(target=self._work, name="owner-parts", daemon=True)
        self._host: SharedMemoryAllReduce | None = None  # where all ranks share it
        if all_reduce is not None:
            self._host = all_reduce.inside if all_reduce.between is None else None
            self._thread.start()

    def bucket(self, tensors: Sequence[Tensor], owners: Mapping[Tensor, int]) -> Bucket:
        """Arranges tensors by their owners, ranks of the group."""
        of_rank: list[list[Tensor]] = [[] for _ in self._order]
        for tensor in sorted(tensors, key=_is_large):
            of_rank[owners[tensor]].append(tensor)
        parts = [of_rank[rank] for rank in self._order]
        ends = [0, *accumulate(sum(tensor.numel() for tensor in part) for part in parts)]
        bounds, own = [*pairwise(ends)], of_rank[self._group.rank]
        start, end = bounds[self._order.index(self._group.rank)]
        return Bucket(parts, [*chain.from_iterable(parts)], bounds, (own, slice(start, end)))

    def reduce(
        self, bucket: Bucket, values: Sequence[Tensor], *, to_all: bool = False, is_last: bool = False
    ) -> Callable[[], Tensor]:
        """Begins to average dense values of a bucket's members, which the caller forgets.

        With ``is_last`` it may wait here; the caller has waited for all earlier ones.

        Returns:
            What waits for the averages, flat: those of this rank's members alone, or of all on all ranks.
        """
        device, part = values[0].device, slice(None) if to_all else bucket.own[1]
        if self._host is not None and not to_all:
            left, sums = iter(values), torch.empty(part.stop - part.start, dtype=values[0].dtype)
            parts = [_flats([*islice(left, len(members))]) for members in bucket.parts]
            move = partial(self._host.reduce_parts, parts, sums, average=True)
            wait = self._beside("reduce_scatter", bucket, self._sent(bucket)[0], move, here=is_last)
            return lambda: wait().to(device)
        flat = torch.cat([value.reshape(-1) for value in values])
        if self._all_reduce is None:
            averages = self._by_back_end("all_reduce" if to_all else "reduce", bucket, flat.div_(self._group.size))
            return lambda: averages()[part].clone()
        whole = flat.cpu()
        if to_all:
            sent, move = self._all_reduce.plan(whole, average=True).sent, partial(self._all_reduce, whole, average=True)
        else:
            sent, move = self._sent(bucket)[0], partial(self._own_averages, bucket, whole)
        wait = self._beside("all_reduce" if to_all else "reduce_scatter", bucket, sent, move, here=is_last)
        return lambda: wait().to(device)

    def _own_averages(self, bucket: Bucket, whole: Tensor) -> Tensor:
        assert self._all_reduce is not None
        self._all_reduce.reduce_scatter(whole, bucket.bounds, average=True)
        return whole[bucket.own[1]].clone()  # the rest is freed

    def gather(self, bucket: Bucket) -> Callable[[], None]:
        """Begins to give all ranks the owners' values of a bucket's members; returns what waits for them.

        Within a host it waits here. The caller has waited for all averages.
        """
        own, part = bucket.own
        if self._host is not None:
            parts = [_flats(members, are_read=members is own) for members in bucket.parts]
            sent, work = self._sent(bucket)[1], partial(self._host.gather_parts, parts)
            wait = self._beside("all_gather", bucket, sent, work, here=True)
        else:
            flat = bucket.members[0].new_empty(bucket.bounds[-1][1])
            if own:
                torch.cat([value.reshape(-1) for value in own], out=flat[part])
            if self._all_reduce is None:
                wait = self._by_back_end("broadcast", bucket, flat)
            else:
                flat = flat.cpu()
                sent, work = self._sent(bucket)[1], partial(self._all_reduce.all_gather, flat, bucket.bounds)
                wait = self._beside("all_gather", bucket, sent, work, here=False)
            parts = [[flat[a:b]] for a, b in bucket.bounds]

        def fill() -> None:
            wait()
            for members, flats in zip(bucket.parts, parts, strict=True):
                if members and members is not own:
                    _fill(members, flats)

        return fill

    def _sent(self, bucket: Bucket) -> tuple[SentBytes, SentBytes]:
        assert self._all_reduce is not None
        return self._all_reduce.sent_parts(bucket.bounds, bucket.members[0].itemsize)

    def _beside(
        self, operation: str, bucket: Bucket, sent: SentBytes, work: Callable[[], Any], *, here: bool
    ) -> Callable[[], Any]:
        """Moves a bucket in the host's memory: in this object's thread or, which wakes no thread, in the caller's."""
        size_bytes, moved = bucket.bounds[-1][1] * bucket.members[0].itemsize, Future[Any]()
        described = {"sent_bytes": sum(sent), "memory_bytes": sent.memory, "blocking": here}
        job = moved, self._group.begin(operation, size_bytes, **described), work
        if here:
            self._do(*job)
        else:
            self._jobs.put(job)
        return moved.result

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(*job)
            del job  # and the memory of tensors

    @torch.no_grad()
    def _do(self, moved: Future[Any], transfer: Transfer, work: Callable[[], Any]) -> None:
        try:
            with transfer:
                moved.set_result(work())
        except BaseException as error:
            moved.set_exception(error)

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
