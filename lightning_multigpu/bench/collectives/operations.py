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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lightning_multigpu.communication.metering.traffic import sent_share

if TYPE_CHECKING:  # the table is read for --help too, which does without
    import torch
    from torch import Tensor

_EXACT = 256

Extent = Literal["whole", "part", "none"]


@dataclass(frozen=True)
class Operation:
    """One collective.

    Args:
        given: how much of S each rank puts in.
        taken: how much of S comes out; "none" where the result is in the tensor that went in.
        expected: the parts of the result on ``rank`` of ``world_size``, in order: the rank of the tensor that each
            comes from (None: the sum), and its number there.
        traffic: the name under which ``communication.traffic`` knows it, if another.
    """

    name: str
    given: Extent
    taken: Extent
    expected: Callable[[int, int], list[tuple[int | None, int]]]
    traffic: str = ""

    def bus_factor(self, world_size: int) -> float:
        """busbw over algbw, as nccl-tests has it."""
        return sent_share(self.traffic or self.name, world_size)

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


def pattern(tensor: Tensor, ranks: Sequence[int], world_size: int, *, summed: bool, offset: int = 0) -> Tensor:
    """Numbers like ``tensor`` that show a wrong element of a result: a wrong rank, position or sum.

    Element i of rank r's tensor is ``(i + 2 r) mod m``; the result is the sum of those of ``ranks`` from element
    ``offset`` on. It is a small integer, so that even sums over all ranks are exact in every type down to bfloat16,
    which has the integers to 256; where tensors are ``summed`` over the ranks, m becomes smaller the more of them there
    are. The period m is odd, so that chunks whose sizes are powers of two do not look alike, and neither do two ranks
    less than m apart.
    """
    import torch

    modulus = max(3, (_EXACT // (world_size if summed else 1) - 1) | 1)
    period = torch.arange(modulus)
    values = torch.stack([(period + 2 * rank) % modulus for rank in ranks]).sum(0).to(tensor.device, tensor.dtype)
    start = offset % modulus
    return values.repeat(tensor.numel() // modulus + 2)[start : start + tensor.numel()]


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
        import torch

        numel = max(1, size // dtype.itemsize // world_size) * world_size if operation.has_size else 0
        elements = {"whole": numel, "part": numel // world_size, "none": 0}
        given = torch.zeros(elements[operation.given], dtype=dtype, device=device)
        taken = given if operation.taken == "none" else given.new_zeros(elements[operation.taken])
        return cls(operation, rank, world_size, numel, given, taken)

    @property
    def size_bytes(self) -> int:
        """S."""
        return self.numel * self.input.element_size()

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """A whole, in one part a rank."""
        return list(tensor.chunk(self.world_size))

    def fill(self) -> None:
        """Fills the input, and overwrites the output so that a call that does nothing is noticed."""
        self.output.fill_(-1)
        if not (self.operation.name == "broadcast" and self.rank != 0):
            self.input.copy_(self._expected(self.input, self.rank))

    def wrong(self) -> int:
        """The number of wrong elements of the result."""
        expected, size = self.operation.expected(self.rank, self.world_size), self.numel // self.world_size
        parts = zip(expected, self.output.chunk(max(1, len(expected))), strict=False)
        return sum(int((part != self._expected(part, rank, number * size)).sum()) for (rank, number), part in parts)

    def clear(self) -> None:
        """Writes zeros, which do not overflow when they are summed again and again."""
        self.input.zero_()
        self.output.zero_()

    def _expected(self, like: Tensor, rank: int | None, offset: int = 0) -> Tensor:
        summed = any(source is None for source, _ in self.operation.expected(0, 1))
        ranks = range(self.world_size) if rank is None else [rank]
        return pattern(like, ranks, self.world_size, summed=summed, offset=offset)
