"""Numbers that show a wrong element of a collective's result: a wrong rank, position or sum.

Element i of rank r's tensor is ``(i + 2 r) mod m``. It is a small integer, so that even sums over all ranks are exact
in every type down to bfloat16, which has the integers to 256. The period m is odd, so that chunks whose sizes are
powers of two do not look alike, and neither do two ranks less than m apart.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_EXACT = 256
_SHIFT = 2
_BLOCK = 1 << 20


class Pattern:
    """The tensors of a group's ranks before a collective, and sums of them.

    Args:
        world_size: ranks of the group.
        summed: whether tensors are added up over the ranks; if so, m becomes smaller the more of them there are.
        dtype: of the tensors.
        device: where they are.
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
        if rank not in self._blocks:
            period = torch.arange(self._modulus)
            ranks = range(self._world_size) if rank is None else [rank]
            values = sum(((period + _SHIFT * r) % self._modulus for r in ranks), torch.zeros_like(period))
            repeats = _BLOCK // self._modulus + 2
            self._blocks[rank] = values.repeat(repeats).to(self._dtype).to(self._device)
        return self._blocks[rank]
