"""The collectives of the bench: inputs and expected outputs of each rank.

S is the size that the table shows, as nccl-tests counts it: the whole tensor where ranks hold parts of it. With 3
ranks, whose tensors are a, b and c, in thirds::

    operation        in on rank 0     out on rank 0        out on rank 1
    all_reduce       a0 a1 a2         sums s0 s1 s2        s0 s1 s2
    reduce           a0 a1 a2         s0 s1 s2             (nothing)
    broadcast        a0 a1 a2         a0 a1 a2             a0 a1 a2
    reduce_scatter   a0 a1 a2         s0                   s1
    all_gather       a0               a0 b0 c0             a0 b0 c0
    gather           a0               a0 b0 c0             (nothing)
    scatter          a0 a1 a2         a0                   a1
    all_to_all       a0 a1 a2         a0 b0 c0             a1 b1 c1
    send_recv        a0 a1 a2         c0 c1 c2             a0 a1 a2       to the next rank, from the previous one
    barrier          (nothing)        (nothing)            (nothing)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lightning_multigpu.communication.metering.traffic import sent_share

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lightning_multigpu.bench.collectives.pattern import Pattern

Extent = Literal["whole", "part", "none"]
Piece = tuple[int, int, int | None, int]
"""Part of an output: start, length, the rank of the expected tensor (None: the sum), and its first element."""


@dataclass(frozen=True)
class Operation:
    """One collective.

    Args:
        name: as in ``torch.distributed``.
        given: how much of S each rank puts in.
        taken: how much of S comes out; "none" where the result is in the tensor that went in.
        expected: the pieces of the result on ``rank`` of ``world_size``, for a whole of ``numel`` elements.
        traffic: the name under which ``communication.traffic`` knows it, if another.
    """

    name: str
    given: Extent
    taken: Extent
    expected: Callable[[int, int, int], list[Piece]]
    traffic: str = ""

    def bus_factor(self, world_size: int) -> float:
        """busbw over algbw, as nccl-tests has it."""
        return sent_share(self.traffic or self.name, world_size)

    @property
    def is_sum(self) -> bool:
        """Whether it adds up."""
        return any(rank is None for _, _, rank, _ in self.expected(0, 1, 1))

    @property
    def has_size(self) -> bool:
        """Whether it moves a tensor."""
        return self.given != "none"


def _sums(rank: int, world_size: int, numel: int) -> list[Piece]:
    return [(0, numel, None, 0)]


def _sums_at_root(rank: int, world_size: int, numel: int) -> list[Piece]:
    return _sums(rank, world_size, numel) if rank == 0 else []


def _roots(rank: int, world_size: int, numel: int) -> list[Piece]:
    return [(0, numel, 0, 0)]


def _own_sums(rank: int, world_size: int, numel: int) -> list[Piece]:
    part = numel // world_size
    return [(0, part, None, rank * part)]


def _all_parts(rank: int, world_size: int, numel: int) -> list[Piece]:
    part = numel // world_size
    return [(source * part, part, source, 0) for source in range(world_size)]


def _all_parts_at_root(rank: int, world_size: int, numel: int) -> list[Piece]:
    return _all_parts(rank, world_size, numel) if rank == 0 else []


def _own_part_of_root(rank: int, world_size: int, numel: int) -> list[Piece]:
    part = numel // world_size
    return [(0, part, 0, rank * part)]


def _own_part_of_all(rank: int, world_size: int, numel: int) -> list[Piece]:
    part = numel // world_size
    return [(source * part, part, source, rank * part) for source in range(world_size)]


def _previous(rank: int, world_size: int, numel: int) -> list[Piece]:
    return [(0, numel, (rank - 1) % world_size, 0)]


def _nothing(rank: int, world_size: int, numel: int) -> list[Piece]:
    return []


OPERATIONS: tuple[Operation, ...] = (
    Operation("all_reduce", "whole", "none", _sums),
    Operation("reduce_scatter", "whole", "part", _own_sums),
    Operation("all_gather", "part", "whole", _all_parts),
    Operation("broadcast", "whole", "none", _roots),
    Operation("reduce", "whole", "none", _sums_at_root),
    Operation("gather", "part", "whole", _all_parts_at_root),
    Operation("scatter", "whole", "part", _own_part_of_root),
    Operation("all_to_all", "whole", "whole", _own_part_of_all),
    Operation("send_recv", "whole", "whole", _previous, traffic="send"),
    Operation("barrier", "none", "none", _nothing),
)
BY_NAME = {operation.name: operation for operation in OPERATIONS}


@dataclass(frozen=True)
class Buffers:
    """The tensors of one rank for one operation, flat; ``output`` is ``input`` where the result takes its place."""

    operation: Operation
    rank: int
    world_size: int
    numel: int
    input: Tensor
    output: Tensor

    @classmethod
    def make(
        cls, operation: Operation, size: int, *, rank: int, world_size: int, dtype: torch.dtype, device: torch.device
    ) -> Buffers:
        """Tensors for S of at most ``size`` bytes, rounded down so that each rank has an equal part, but never to 0."""
        import torch  # the table is read for --help too, which does without

        numel = max(1, size // dtype.itemsize // world_size) * world_size if operation.has_size else 0
        elements = {"whole": numel, "part": numel // world_size, "none": 0}
        given = torch.zeros(elements[operation.given], dtype=dtype, device=device)
        taken = given
        if operation.taken != "none":
            taken = torch.zeros(elements[operation.taken], dtype=dtype, device=device)
        return cls(operation, rank, world_size, numel, given, taken)

    @property
    def size_bytes(self) -> int:
        """S."""
        return self.numel * self.input.element_size()

    def parts(self, tensor: Tensor) -> Iterator[Tensor]:
        """A whole, in one part a rank."""
        return iter(tensor.chunk(self.world_size))

    def fill(self, pattern: Pattern) -> None:
        """Fills the input, and overwrites the output so that a call that does nothing is noticed."""
        self.output.fill_(-1)
        if not (self.operation.name == "broadcast" and self.rank != 0):
            pattern.fill(self.input, self.rank)

    def wrong(self, pattern: Pattern) -> int:
        """The number of wrong elements of the result."""
        pieces = self.operation.expected(self.rank, self.world_size, self.numel)
        return sum(pattern.wrong(self.output[a : a + length], rank, offset) for a, length, rank, offset in pieces)

    def clear(self) -> None:
        """Writes zeros, which do not overflow when they are summed again and again."""
        self.input.zero_()
        self.output.zero_()
