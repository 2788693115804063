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
from itertools import chain, islice
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce, SentBytes
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.records import Transfer

_END_S = 5.0
_LARGE_BYTES = 1 << 18
"""Larger tensors travel from where they are; smaller ones are copied into one."""
MOST = 8
"""A bucket has at most so many times the bytes that it has to have of each rank, where it has too few of one rank."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Tensors of one dtype and device that travel together, those of each owner one after the other.

    Attributes:
        parts: the tensors of each rank, large ones last, in the order of :attr:`OwnerParts.order`.
        numels: the elements of each part.
        members: the tensors of all parts.
        own: those that this rank owns.
    """

    parts: list[list[Tensor]]
    numels: list[int]
    members: list[Tensor]
    own: list[Tensor]


def split(flat: Tensor, members: Sequence[Tensor]) -> list[Tensor]:
    """The places of tensors in flat memory, in their shapes."""
    return _unflatten_dense_tensors(flat, members)  # type: ignore[no-untyped-call,no-any-return]


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
        found.insert(0, _flatten_dense_tensors(small))  # type: ignore[no-untyped-call]
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
        if all_reduce is not None:
            self._thread.start()

    def bucket(self, tensors: Sequence[Tensor], owners: Mapping[Tensor, int]) -> Bucket:
        """Arranges tensors by their owners, ranks of the group."""
        of_rank: list[list[Tensor]] = [[] for _ in self._order]
        for tensor in sorted(tensors, key=_is_large):
            of_rank[owners[tensor]].append(tensor)
        parts = [of_rank[rank] for rank in self._order]
        numels = [sum(tensor.numel() for tensor in part) for part in parts]
        return Bucket(parts, numels, [*chain.from_iterable(parts)], of_rank[self._group.rank])

    def reduce(
        self, bucket: Bucket, values: Sequence[Tensor], *, to_all: bool = False, is_last: bool = False
    ) -> Callable[[], Tensor]:
        """Begins to average dense values of a bucket's members, which the caller forgets.

        With ``is_last`` it may wait here; the caller has waited for all earlier ones.

        Returns:
            What waits for the averages, flat: those of this rank's members alone, or of all on all ranks.
        """
        all_reduce, device, operation = self._all_reduce, values[0].device, "all_reduce" if to_all else "reduce"
        if all_reduce is None:
            flat = torch.cat([value.reshape(-1) for value in values]).div_(self._group.size)
            averaged = self._by_back_end(operation, bucket, flat)
            own = self._order.index(self._group.rank)
            return lambda: averaged() if to_all else averaged().split_with_sizes(bucket.numels)[own].clone()
        if to_all:
            whole = torch.cat([value.reshape(-1) for value in values]).cpu()
            sent, work = all_reduce.plan(whole, average=True).sent, partial(all_reduce, whole, average=True)
        else:
            left = iter(values)
            parts = [_flats([*islice(left, len(part))]) for part in bucket.parts]
            operation = "reduce_scatter"
            sent, work = self._sent(bucket)[0], partial(all_reduce.reduce_scatter, parts, average=True)
        moved = self._move(operation, bucket, sent, work, is_last)
        return lambda: moved().to(device)

    def gather(self, bucket: Bucket) -> Callable[[], None]:
        """Gives all ranks the owners' values of a bucket's members; returns what waits for them.

        The caller has waited for all averages.
        """
        if self._all_reduce is None:
            flat = torch.cat([member.reshape(-1) for member in bucket.members])
            parts = [[part] for part in flat.split_with_sizes(bucket.numels)]
            wait: Callable[[], object] = self._by_back_end("broadcast", bucket, flat)
        else:
            parts = [_flats(part, are_read=part is bucket.own) for part in bucket.parts]
            sent, work = self._sent(bucket)[1], partial(self._all_reduce.all_gather, parts)
            wait = self._move("all_gather", bucket, sent, work, True)

        def fill() -> None:
            wait()
            for members, flats in zip(bucket.parts, parts, strict=True):
                if members and members is not bucket.own:
                    _fill(members, flats)

        return fill

    def _sent(self, bucket: Bucket) -> tuple[SentBytes, SentBytes]:
        assert self._all_reduce is not None
        return self._all_reduce.sent_parts([numel * bucket.members[0].itemsize for numel in bucket.numels])

    def _move(
        self, operation: str, bucket: Bucket, sent: SentBytes, work: Callable[[], Any], is_last: bool
    ) -> Callable[[], Any]:
        """Has this object's thread move a bucket in the host's memory, or does so itself, which wakes no thread."""
        size_bytes, moved = sum(bucket.numels) * bucket.members[0].itemsize, Future[Any]()
        described = {"sent_bytes": sum(sent), "memory_bytes": sent.memory, "blocking": is_last}
        job = moved, self._group.begin(operation, size_bytes, **described), work
        if is_last:
            self._do(*job)
        else:
            self._jobs.put(job)
        return moved.result

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(*job)
            del job  # and the memory of tensors

    def _do(self, moved: Future[Any], transfer: Transfer, work: Callable[[], Any]) -> None:
        try:
            with transfer:
                moved.set_result(work())
        except BaseException as error:
            moved.set_exception(error)

    def _by_back_end(self, operation: str, bucket: Bucket, flat: Tensor) -> Callable[[], Tensor]:
        works: list[tuple[Any, Transfer]] = []
        group, ranks = self._group, self._group.ranks
        of_ranks = zip(self._order, flat.split_with_sizes(bucket.numels), strict=True)
        parts = [(rank, part) for rank, part in of_ranks if part.numel()]
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
