"""The all-reduce between ranks of one host through shared memory, without sockets.

A tensor is cut into chunks that fit into the cache; several are under way at once (:mod:`.shared_buffers`). Each chunk
of an all-reduce goes through three stages::

    write           every rank copies its chunk into its slot
    sum own part    every rank sums its part of the chunk over all slots
    read the sums   every rank copies the sums into its tensor

With two ranks, or for small tensors, there are two stages: after ``write`` every rank makes all sums itself. Tensors
that were moved into shared memory (:meth:`SharedMemoryAllReduce.move`) are summed where they are
(:mod:`.in_place_shared`).

Sums are made in the order of ranks, those of a reduce-scatter beginning with the rank's own values, so all ranks and
all runs get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.ring import chunk_bounds
from lightning_multigpu.communication.shared_memory.in_place_shared import InPlaceTensors
from lightning_multigpu.communication.shared_memory.shared_buffers import SharedBuffers
from lightning_multigpu.communication.tensors import check_reducible

DEFAULT_CHUNK_BYTES = 1 << 20
DEFAULT_DIRECT_BYTES = 1 << 18
DEFAULT_TIMEOUT_S = 1800.0
IN_PLACE_FROM_BYTES = 1 << 17
"""Smaller tensors are copied although they were moved: that takes one barrier instead of two."""

_IN_PLACE_BYTES = 1 << 18
_TEXT_BYTES = 512
Bounds = Sequence[tuple[int, int]]
Parts = Sequence[Sequence[Tensor]]
_SUMMED_IN_FLOAT32 = (torch.float16, torch.bfloat16)


class SharedMemoryAllReduce:
    """Sums or averages CPU tensors over the ranks of one host; also has reduce-scatter and all-gather.

    All ranks of the group must call the same collectives in the same order, one at a time; which thread calls does not
    matter. Tensors are dense, contiguous, on the CPU, and of the same shape and dtype on every rank. float16 and
    bfloat16 are summed in float32 and rounded once.

    The constructor is a collective of the group.

    Args:
        group: ranks of one host, over gloo; used only to share the memory.
        direct_bytes: up to this size every rank makes all sums itself, which saves a barrier; for three or more ranks.
        timeout_s: seconds that a rank waits for the others.

    Raises:
        SharedMemoryUnavailableError: the ranks cannot share memory; all ranks raise.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        direct_bytes: int = DEFAULT_DIRECT_BYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._buffers = SharedBuffers(group, chunk_bytes=chunk_bytes, timeout_s=timeout_s)
        self.rank = self._buffers.rank
        self.world_size = self._buffers.world_size
        self.direct_bytes = direct_bytes
        self._in_place = InPlaceTensors(self.rank, self._exchange)
        self.limit = self._buffers.limit

    def move(self, tensor: Tensor, key: int) -> None:
        """Moves a tensor into memory that all ranks share, so that it is reduced without copies from now on.

        A collective; no other thread may work on the tensor meanwhile.

        Args:
            tensor: one-dimensional, alone in its storage, equally long on every rank; its views are moved too.
            key: a number for it; replaces an earlier tensor with this number.

        Raises:
            SharedMemoryUnavailableError: on all ranks; the tensor stays usable.
        """
        self._in_place.move(_flat(tensor, False), key)

    def has_moved(self, tensor: Tensor) -> bool:
        """Whether :meth:`move` was called for the tensor; the same on all ranks."""
        return self._in_place.rows(tensor) is not None

    def sent_bytes(self, tensor: Tensor) -> int:
        """Bytes that this rank writes for the others: their shards, and the sums of its own shard."""
        return tensor.nbytes if self.world_size > 1 else 0

    def __call__(self, tensor: Tensor, *, average: bool = False) -> Tensor:
        """Reduces ``tensor`` in place over all ranks and returns it.

        Args:
            tensor: any shape.
            average: divide the sums by the number of ranks; needs a floating-point or complex dtype.

        Raises:
            ValueError: the tensor is not on the CPU, not contiguous, or an average of integers is asked for.
            ConnectionLostError: another rank has ended, :meth:`abort` was called, or the time is up.
        """
        self.plan(tensor, average=average)()
        return tensor

    def plan(self, tensor: Tensor, *, average: bool = False) -> Callable[[], None]:
        """What reduces ``tensor`` whenever it is called, as long as the tensor's memory stays the same."""
        flat = _flat(tensor, average)
        moved = self._in_place.rows(flat) if flat.nbytes > IN_PLACE_FROM_BYTES else None
        if moved is not None:
            own_parts = [self._shards(row, None)[self.rank] for row in moved]
            return partial(
                self._buffers.run, 1, _nothing, lambda _: self._sum_chunks(own_parts, average, to_all=True), _nothing
            )
        chunks = self._chunks(flat)
        rows = self._buffers.rows

        def write(chunk: int) -> None:
            source = chunks[chunk]
            rows(0, 0, source)[self.rank].copy_(source)

        def sum_all(chunk: int) -> None:
            out = chunks[chunk]
            self._sum(rows(1, 0, out)[: self.world_size], out, average)

        def sum_own(chunk: int) -> None:
            a, b = chunk_bounds(chunks[chunk].numel(), self.world_size)[self.rank]
            own = chunks[chunk][a:b]
            self._sum(rows(1, a, own)[: self.world_size], rows(0, a, own)[-1], average)

        def read_sums(chunk: int) -> None:
            out = chunks[chunk]
            out.copy_(rows(1, 0, out)[-1])

        is_direct = self.world_size == 2 or flat.nbytes <= self.direct_bytes
        return partial(
            self._buffers.run, len(chunks), *((write, sum_all) if is_direct else (write, sum_own, read_sums))
        )

    def reduce_scatter(self, tensor: Tensor, *, average: bool = False, bounds: Bounds | None = None) -> Tensor:
        """Writes the sums over all ranks into this rank's shard of ``tensor``.

        The other shards do not change, except in a moved tensor: a faster rank may already gather its shard. Arguments
        and errors as for an all-reduce, and:

        Args:
            bounds: first and one-past-last element of each rank's shard; the shards are consecutive and may be empty.
                By default they are as even as possible.

        Returns:
            The shard, a flat view of ``tensor``.
        """
        flat = _flat(tensor, average)
        shards = self._shards(flat, bounds)
        moved = self._in_place.rows(flat)
        if moved is not None:
            own = [self._shards(row, bounds)[self.rank] for row in moved]
            self._buffers.run(1, _nothing, lambda _: self._sum_chunks(own, average))
        else:
            self.reduce_parts([[shard] for shard in shards], shards[self.rank], average=average)
        return shards[self.rank]

    def reduce_parts(self, parts: Parts, sums: Tensor, *, average: bool = False) -> Tensor:
        """Writes the sums of this rank's part to ``sums``, which is flat, and returns it; no other part changes.

        Args:
            parts: of each rank of two or more: flat tensors, as many and as long on every rank, all of one dtype.
        """
        # A slot has places for the parts of the other ranks, in their order.
        rows, rank, size = self._buffers.rows, self.rank, self._chunk_elements(sums) // max(1, self.world_size - 1)
        chunks = _cut(parts, size)
        own = chunks[rank]
        sums_of = sums.split_with_sizes([piece.numel() for piece in own])

        def write(chunk: int) -> None:
            for owner, pieces in enumerate(chunks):
                if owner != rank and chunk < len(pieces):
                    rows(0, (owner - (owner > rank)) * size, pieces[chunk])[rank].copy_(pieces[chunk])

        def sum_own(chunk: int) -> None:
            if chunk < len(own):
                piece = own[chunk]
                before, after = rows(1, (rank - 1) * size, piece)[:rank], rows(1, rank * size, piece)[rank + 1 : -1]
                self._sum((piece, *before, *after), sums_of[chunk], average)

        self._buffers.run(max(map(len, chunks)), write, sum_own)
        return sums

    def all_gather(self, tensor: Tensor, *, bounds: Bounds | None = None) -> Tensor:
        """Fills ``tensor`` in place with the shard of every rank, and returns it.

        Errors as for an all-reduce; ``bounds`` as for :meth:`reduce_scatter`.
        """
        flat = _flat(tensor)
        shards = self._shards(flat, bounds)
        moved = self._in_place.rows(flat)
        if moved is not None:
            # After a reduce-scatter no other rank reads or writes these parts.
            others = [self._shards(row, bounds)[self.rank] for rank, row in enumerate(moved) if rank != self.rank]
            self._buffers.run(1, lambda _: [other.copy_(shards[self.rank]) for other in others], _nothing)
        else:
            self.gather_parts([[shard] for shard in shards])
        return tensor

    def gather_parts(self, parts: Parts) -> None:
        """Fills the other ranks' parts with their values; ``parts`` as for :meth:`reduce_parts`."""
        rows = self._buffers.rows
        chunks = _cut(parts, self._chunk_elements(next(chain.from_iterable(parts))))
        own = chunks[self.rank]

        def write(chunk: int) -> None:
            if chunk < len(own):
                rows(0, 0, own[chunk])[self.rank].copy_(own[chunk])

        def read(chunk: int) -> None:
            for rank, pieces in enumerate(chunks):
                if rank != self.rank and chunk < len(pieces):
                    pieces[chunk].copy_(rows(1, 0, pieces[chunk])[rank])

        self._buffers.run(max(map(len, chunks)), write, read)

    def forget_moved(self) -> None:
        """Releases the memory of all moved tensors; this rank's own stay usable, as if they were not moved."""
        self._in_place.close()

    def abort(self) -> None:
        """Makes every rank that is in a collective, or calls one later, raise; any thread may call this."""
        self._buffers.abort()

    def close(self) -> None:
        """Releases the memory; ranks that still wait for this one raise. A second call does nothing."""
        self._in_place.close()
        self._buffers.close()

    def _exchange(self, text: str) -> list[str]:
        """The texts of all ranks, cut to 512 bytes each."""
        encoded = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        texts = torch.zeros(self.world_size, _TEXT_BYTES, dtype=torch.uint8)
        texts[self.rank] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        self.all_gather(texts, bounds=[(r * _TEXT_BYTES, (r + 1) * _TEXT_BYTES) for r in range(self.world_size)])
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in texts]

    def _sum_chunks(self, parts: Sequence[Tensor], average: bool, *, to_all: bool = False) -> None:
        """Sums ``parts`` into this rank's part, or into every part, chunk by chunk while a chunk is in cache."""
        size = _IN_PLACE_BYTES // parts[0].element_size()
        # The first two sources are read before any result is written; a later one would be overwritten too early.
        scratch = None if self.rank < 2 else parts[0].new_empty(min(size, parts[0].numel()))
        for start in range(0, parts[0].numel(), size):
            sources = tuple(part[start : start + size] for part in parts)
            own = sources[self.rank]
            out = own if scratch is None else scratch[: own.numel()]
            self._sum(sources, out, average)
            for part in sources if to_all else (own,):
                if part is not out:
                    part.copy_(out)

    def _sum(self, sources: tuple[Tensor, ...], out: Tensor, average: bool) -> None:
        """Writes the sum of ``sources``, made in their order, to ``out``; all have the same length."""
        first, second, *others = sources
        if out.dtype in _SUMMED_IN_FLOAT32:
            total = first.float()
            total.add_(second)
        else:
            total = torch.add(first, second, out=out)
        for other in others:
            total.add_(other)
        if average:
            total.div_(self.world_size)
        if total is not out:
            out.copy_(total)

    def _shards(self, flat: Tensor, bounds: Bounds | None) -> list[Tensor]:
        return [flat[a:b] for a, b in bounds or chunk_bounds(flat.numel(), self.world_size)]

    def _chunks(self, flat: Tensor) -> tuple[Tensor, ...]:
        """One-dimensional tensors; none for an empty tensor."""
        size = self._chunk_elements(flat)
        if flat.numel() <= size:
            return (flat,) if flat.numel() else ()
        return flat.split(size)  # type: ignore[no-untyped-call,no-any-return]

    def _chunk_elements(self, flat: Tensor) -> int:
        return self._buffers.chunk_bytes // flat.element_size()


def _cut(parts: Parts, size: int) -> list[list[Tensor]]:
    """The pieces of each part, of ``size`` elements at most."""
    return [[piece for flat in part for piece in flat.split(size)] for part in parts]  # type: ignore[no-untyped-call]


def _nothing(_: int) -> None:
    pass


def _flat(tensor: Tensor, average: bool = False) -> Tensor:
    check_reducible(tensor, "shared memory", average=average)
    return tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().view(-1)
