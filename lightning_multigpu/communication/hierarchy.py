"""All-reduce over the ranks of several hosts with the least traffic over the network.

The ranks of a host first reduce among themselves, each its own shard; then the owners of the same shard on all hosts
reduce it among themselves; then each host gathers the shards. With two hosts of two ranks each (a0 is rank 0's part of
shard a; capitals are complete sums)::

                 host 0: rank 0   rank 1        host 1: rank 2   rank 3
    start                a0 b0    a1 b1                 a2 b2    a3 b3
    inside               a0+a1    b0+b1                 a2+a3    b2+b3       shared memory
    between              A        B                     A        B           network: 0 with 2, 1 with 3
    inside               A B      A B                   A B      A B         shared memory

With n hosts each host sends 2(n-1)/n of the tensor, whatever the number of its ranks, and all of its ranks send their
shares at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_multigpu.communication.compression import CompressedAllReduce
from lightning_multigpu.communication.ring import GATHER, REDUCE, RingAllReduce, chunk_bounds
from lightning_multigpu.communication.shared_memory.host_all_reduce import Bounds, SharedMemoryAllReduce
from lightning_multigpu.communication.shared_memory.segment import SharedMemoryUnavailableError

MOST_MOVED = 256
"""The most tensors that lie in shared memory at once."""


class SentBytes(NamedTuple):
    """Bytes that one rank sends to others over the network and through shared memory."""

    network: int
    memory: int


class Plan(NamedTuple):
    """How a tensor is reduced, in every step in which its memory is the same.

    Attributes:
        sent: bytes that this rank sends.
        begin: starts to reduce, and returns what finishes it, which waits for the other ranks; None if it is finished.
    """

    sent: SentBytes
    begin: Callable[[], Callable[[], object] | None]


class HierarchicalAllReduce:
    """Sums or averages CPU tensors over all ranks; all ranks get the same bits.

    All ranks must make the same calls in the same order, one at a time; which thread calls does not matter.

    Args:
        inside: all-reduce over the ranks of this host; None if each host has one rank.
        between: all-reduce over the ranks that hold the same shard on every host; None with one host. Without
            ``inside`` it is over all ranks.

    Attributes:
        compressed: the all-reduce between hosts, if it compresses.
    """

    def __init__(
        self, inside: SharedMemoryAllReduce | None, between: RingAllReduce | CompressedAllReduce | None
    ) -> None:
        self.inside = inside
        self.between = between
        self.compressed = between if isinstance(between, CompressedAllReduce) else None
        # For tensors other than gradients, which must not lose precision.
        self._ring = between.ring if isinstance(between, CompressedAllReduce) else between
        self._can_move = True

    def __call__(self, tensor: Tensor, key: Hashable = None, *, average: bool = False) -> Tensor:
        """Reduces ``tensor`` in place and returns it.

        Args:
            tensor: any shape, contiguous, on the CPU; the same shape and dtype on every rank.
            key: of these gradients in every step, for compression; other tensors have none, and lose no precision.
            average: divide the sums by the number of ranks; needs a floating-point dtype.

        Raises:
            ValueError: the tensor is not on the CPU, not contiguous, or of a wrong dtype.
            RuntimeError: another rank has ended, or the time is up.
        """
        if (finish := self.plan(tensor, key, average=average).begin()) is not None:
            finish()
        return tensor

    def plan(self, tensor: Tensor, key: Hashable = None, *, average: bool = False) -> Plan:
        """As a call, in two halves that can be called in every step.

        The first may return while this rank's parts are still being sent. So one tensor is sent while the next is
        encoded, and the network is never idle between two tensors. A rank must finish tensors in the order in which it
        began them; other ranks may mix beginning and finishing differently.
        """
        inside, ring, compressed = self.inside, self._ring, None if key is None else self.compressed
        if not tensor.numel() or (inside is None and ring is None):
            return Plan(SentBytes(0, 0), lambda: None)
        if ring is None:
            assert inside is not None
            # Within a host all ranks take each step together, so nothing can begin early.
            return Plan(SentBytes(0, inside.sent_bytes(tensor)), inside.plan(tensor, average=average))
        between = compressed or ring
        begin: Callable[..., Any] = ring.begin if compressed is None else partial(compressed.begin, key=key)
        if inside is None:
            return Plan(SentBytes(between.sent_bytes(tensor), 0), lambda: begin(tensor, average=average))
        flat = tensor.detach().view(-1)
        bounds = chunk_bounds(flat.numel(), inside.world_size)
        start, end = bounds[inside.rank]

        def reduce() -> None:
            shard = inside.reduce_scatter(flat, average=average, bounds=bounds)
            if shard.numel():
                begin(shard, average=average)()
            inside.all_gather(flat, bounds=bounds)

        # Memory: its values of the others' shards, and the sums of its own shard.
        return Plan(SentBytes(between.sent_bytes(flat[start:end]), flat.nbytes), reduce)

    @property
    def order(self) -> list[int]:
        """The order of the ranks' parts in :meth:`reduce_scatter`: first those of the first ranks of all hosts.

        Rank r is rank r % k of host r // k, where each host has k ranks.
        """
        size, hosts = self._layout
        return [host * size + local for local in range(size) for host in range(hosts)]

    @property
    def _layout(self) -> tuple[int, int]:
        return 1 if self.inside is None else self.inside.world_size, 1 if self._ring is None else self._ring.world_size

    def _parts(self, bounds: Bounds) -> tuple[Bounds, Bounds, slice]:
        """The shards of this host's ranks; the parts of all hosts within this rank's shard; and that shard."""
        size, hosts = self._layout
        inside = [(bounds[k * hosts][0], bounds[(k + 1) * hosts - 1][1]) for k in range(size)]
        own = 0 if self.inside is None else self.inside.rank
        start, end = inside[own]
        return inside, [(a - start, b - start) for a, b in bounds[own * hosts :][:hosts]], slice(start, end)

    def reduce_scatter(self, flat: Tensor, bounds: Bounds, *, average: bool = False) -> None:
        """Reduces each rank's part of ``flat`` on that rank; other parts are overwritten. Raises as a call.

        Args:
            bounds: first and one-past-last element of the part of each rank, in :attr:`order`, one after the other.
        """
        inside, between, shard = self._parts(bounds)
        if self.inside is not None:
            self.inside.reduce_scatter(flat, average=average, bounds=inside)
        if self._ring is not None:
            self._ring.begin(flat[shard], average=average, phases=REDUCE, bounds=between)()

    def all_gather(self, flat: Tensor, bounds: Bounds) -> None:
        """Fills ``flat`` with the part of every rank; ``bounds`` as for :meth:`reduce_scatter`. Raises as a call."""
        inside, between, shard = self._parts(bounds)
        if self._ring is not None:
            self._ring.begin(flat[shard], phases=GATHER, bounds=between)()
        if self.inside is not None:
            self.inside.all_gather(flat, bounds=inside)

    def sent_parts(self, bounds: Bounds, itemsize: int) -> tuple[SentBytes, SentBytes]:
        """Bytes that this rank sends in a :meth:`reduce_scatter`, and in an :meth:`all_gather`."""
        inside, between, _ = self._parts(bounds)
        sizes = [(b - a) * itemsize for a, b in between]
        own, held, total = 0 if self._ring is None else self._ring.rank, sum(sizes), inside[-1][1] * itemsize
        shared = 0 if self.inside is None else held
        return SentBytes(held - sizes[own], total - held), SentBytes(held - sizes[(own + 1) % len(sizes)], shared)

    def move(self, tensor: Tensor, key: int) -> bool:
        """Moves a tensor that is reduced in every step into shared memory, where it is reduced without copies.

        A slow collective of the host's ranks; does nothing for a tensor that was moved before.

        Args:
            tensor: one-dimensional, alone in its storage; its views are moved too.
            key: a number for the tensor; replaces an earlier tensor with this number. From :data:`MOST_MOVED` on
                nothing is moved, because each tensor takes a file descriptor.

        Returns:
            Whether the tensor is in shared memory now; the same on all ranks of the host.
        """
        if self.inside is None or not self._can_move or key >= MOST_MOVED:
            return False
        if not self.inside.has_moved(tensor):
            try:
                self.inside.move(tensor, key)
            except SharedMemoryUnavailableError as error:
                self._can_move = False
                if self.inside.rank == 0:
                    warnings.warn(
                        f"gradients are copied to and from shared memory instead of reduced in place: {error}. More "
                        "room in /dev/shm saves the copies (docker run --shm-size=...)",
                        stacklevel=2,
                    )
        return self._can_move

    def forget_moved(self) -> None:
        """Frees the memory of all moved tensors; no rank may be reducing one."""
        if self.inside is not None:
            self.inside.forget_moved()

    def limit(self, timeout_s: float, *, inside_s: float) -> None:
        """Sets the seconds that this rank waits from now on: for a message between hosts, and for ranks of its host."""
        if self.inside is not None:
            self.inside.limit(inside_s)
        if self._ring is not None:
            self._ring.messages.timeout = timedelta(seconds=timeout_s)

    def end_step(self, loss_scale: float = 1.0) -> None:
        """Ends an optimizer step; compression then keeps the errors of the step. A collective."""
        compressed = self.compressed
        if compressed is None:
            return
        if self.inside is not None and compressed.compressor.has_error_feedback:
            # Values of the other shards may not have been finite; all shards keep or drop the step together.
            finite = torch.tensor([float(compressed.step_is_finite)])
            compressed.step_is_finite = bool(self.inside(finite) == self.inside.world_size)
        compressed.end_step(loss_scale)

    def close(self) -> None:
        """Releases shared memory; a second call does nothing."""
        if self.inside is not None:
            self.inside.close()

    def abort(self) -> None:
        """Makes ranks that wait in shared memory raise; any thread may call it."""
        if self.inside is not None:
            self.inside.abort()
