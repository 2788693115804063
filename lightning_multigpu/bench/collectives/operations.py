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

_EXACT = 256
_SHIFT = 2
_BLOCK = 1 << 20

Extent = Literal["whole", "part", "none"]
Part = tuple[int | None, int]
"""Expected part of an output: the rank of the tensor that it comes from (None: the sum), and its number there."""


@dataclass(frozen=True)
class Operation:
    """One collective.

    Args:
        given: how much of S each rank puts in.
        taken: how much of S comes out; "none" where the result is in the tensor that went in.
        expected: the parts of the result on ``rank`` of ``world_size``, in order.
        traffic: the name under which ``communication.traffic`` knows it, if another.
    """

    name: str
    given: Extent
    taken: Extent
    expected: Callable[[int, int], list[Part]]
    traffic: str = ""

    def bus_factor(self, world_size: int) -> float:
        """busbw over algbw, as nccl-tests has it."""
        return sent_share(self.traffic or self.name, world_size)

    @property
    def is_sum(self) -> bool:
        return any(source is None for source, _ in self.expected(0, 1))

    @property
    def has_size(self) -> bool:
        return self.given != "none"


OPERATIONS: tuple[Operation, ...] = (
    Operation("all_reduce", "whole", "none", lambda rank, n: [(None, part) for part in range(n)]),
    Operation("reduce_scatter", "whole", "part", lambda rank, n: [(None, rank)]),
    Operation("all_gather", "part", "whole", lambda rank, n: [(source, 0) for source in range(n)]),
    Operation("broadcast", "whole", "none", lambda rank, n: [(0, part) for part in range(n)]),
    Operation("reduce", "whole", "none", lambda rank, n: [(None, part) for part in range(n) if rank == 0]),
    Operation("gather", "part", "whole", lambda rank, n: [(source, 0) for source in range(n) if rank == 0]),
    Operation("scatter", "whole", "part", lambda rank, n: [(0, rank)]),
    Operation("all_to_all", "whole", "whole", lambda rank, n: [(source, rank) for source in range(n)]),
    Operation("send_recv", "whole", "whole", lambda rank, n: [((rank - 1) % n, part) for part in range(n)], "send"),
    Operation("barrier", "none", "none", lambda rank, n: []),
)
BY_NAME = {operation.name: operation for operation in OPERATIONS}


class Pattern:
    """Numbers that show a wrong element of a collective's result: a wrong rank, position or sum.

    Element i of rank r's tensor is ``(i + 2 r) mod m``. It is a small integer, so that even sums over all ranks are
    exact in every type down to bfloat16, which has the integers to 256; where tensors are ``summed`` over the ranks, m
    becomes smaller the more of them there are. The period m is odd, so that chunks whose sizes are powers of two do not
    look alike, and neither do two ranks less than m apart.
    """

    def __init__(self, world_size: int, dtype: torch.dtype, device: torch.device, *, summed: bool) -> None:
        self._modulus = max(3, (_EXACT // (world_size if summed else 1) - 1) | 1)
        self._world_size = world_size
        self._dtype = dtype
        self._device = device
        self._blocks: dict[int | None, Tensor] = {}

    def fill(self, tensor: Tensor, rank: int | None, offset: int = 0) -> None:
        """Writes elements ``offset``, ``offset + 1``, ... of ``rank``'s tensor, or (None) of the sum over all ranks."""
        for part, expected in self._parts(tensor, rank, offset):
            part.copy_(expected)

    def wrong(self, tensor: Tensor, rank: int | None, offset: int = 0) -> int:
        """The number of elements that differ from what :meth:`fill` would write."""
        return sum(int((part != expected).sum()) for part, expected in self._parts(tensor, rank, offset))

    def _parts(self, tensor: Tensor, rank: int | None, offset: int) -> Iterator[tuple[Tensor, Tensor]]:
        block = self._block(rank)
        for start in range(0, tensor.numel(), _BLOCK):
            part = tensor[start : start + _BLOCK]
            shift = (offset + start) % self._modulus
            yield part, block[shift : shift + part.numel()]

    def _block(self, rank: int | None) -> Tensor:
        """Enough periods to cut any part out of, from any position on."""
        import torch

        if rank not in self._blocks:
            period = torch.arange(self._modulus)
            ranks = range(self._world_size) if rank is None else [rank]
            values = sum(((period + _SHIFT * r) % self._modulus for r in ranks), torch.zeros_like(period))
            repeats = _BLOCK // self._modulus + 2
            self._blocks[rank] = values.repeat(repeats).to(self._dtype).to(self._device)
        return self._blocks[rank]


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
        expected, size = self.operation.expected(self.rank, self.world_size), self.numel // self.world_size
        parts = zip(expected, self.output.chunk(max(1, len(expected))), strict=False)
        return sum(pattern.wrong(part, source, number * size) for (source, number), part in parts)

    def clear(self) -> None:
        """Writes zeros, which do not overflow when they are summed again and again."""
        self.input.zero_()
        self.output.zero_()
