"""Which part of a parameter each rank has.

A parameter is cut along one dimension into sections of consecutive entries, and each rank has one part of each
section. A fused projection of queries, keys and values has three sections; with two ranks (q0 is rank 0's)::

    whole    | q0 q0 q1 q1 | k0 k0 k1 k1 | v0 v0 v1 v1 |
    rank 0   | q0 q0 k0 k0 v0 v0 |
    rank 1   | q1 q1 k1 k1 v1 v1 |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lightning_multigpu.communication.ring import chunk_bounds
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup


@dataclass(frozen=True)
class ParameterSplit:
    """The cut of a parameter, the same on all ranks.

    Attributes:
        ranges: of each rank, the entries of the whole parameter that it has, as first and one-past-last indices.
    """

    dim: int
    ranges: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def even(
        cls, size: int, num_ranks: int, *, dim: int = 0, sections: Sequence[int] = (), unit: int | Sequence[int] = 1
    ) -> ParameterSplit:
        """The cut of ``size`` entries, as even as can be in whole units.

        Args:
            sections: lengths of the sections; one by default.
            unit: entries that stay together, of a head for example; or one for each section.

        Raises:
            ValueError: the sections do not add up to the size, or are no whole numbers of units.
        """
        lengths = list(sections) or [size]
        units = [unit] * len(lengths) if isinstance(unit, int) else list(unit)
        if (
            sum(lengths) != size
            or len(units) != len(lengths)
            or any(length % each for length, each in zip(lengths, units, strict=True))
        ):
            raise ValueError(f"{size} entries cannot be cut into sections of {lengths} in units of {units}")
        ranges: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
        start = 0
        for length, each in zip(lengths, units, strict=True):
            for rank, (a, b) in enumerate(chunk_bounds(length // each, num_ranks)):
                ranges[rank].append((start + a * each, start + b * each))
            start += length
        return cls(dim, tuple(map(_merged, ranges)))

    @property
    def whole_size(self) -> int:
        """Entries of the whole parameter along the dimension."""
        return max(stop for ranges in self.ranges for _, stop in ranges)

    def whole_shape(self, part: Tensor) -> list[int]:
        """The shape of the whole tensor, from that of any rank's part."""
        shape = list(part.shape)
        shape[self.dim] = self.whole_size
        return shape

    def bounds(self, rank: int) -> tuple[int, int]:
        """First and one-past-last entry of a rank that has one range, or none."""
        ((start, stop),) = self.ranges[rank] or ((0, 0),)
        return start, stop

    def size(self, rank: int) -> int:
        """Entries of a rank's part along the dimension."""
        return sum(stop - start for start, stop in self.ranges[rank])

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """A copy of a rank's part of a whole tensor, which may have more dimensions behind."""
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges[rank] or ((0, 0),)]
        return torch.cat(pieces, self.dim)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor of the parts of all ranks."""
        pieces = [
            (start, part.narrow(self.dim, offset, stop - start))
            for ranges, part in zip(self.ranges, parts, strict=True)
            for (start, stop), offset in zip(ranges, accumulate((b - a for a, b in ranges), initial=0), strict=False)
        ]
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], self.dim)

    def gather(self, part: Tensor, group: TensorGroup, name: str) -> Tensor:
        """The whole tensor of this rank's part and those of the others; a collective."""
        bounds = list(pairwise(accumulate(map(self.size, range(group.size)), initial=0)))
        gathered = group.all_gather(part, self.dim, bounds, name)
        return self.whole([gathered.narrow(self.dim, a, b - a) for a, b in bounds])


def split_of(parameter: Tensor) -> ParameterSplit | None:
    """The cut of a parameter; None if every rank has all of it."""
    split = getattr(getattr(parameter, "placed", None), "split", None)  # see parts.cut
    return split if isinstance(split, ParameterSplit) else None


def whole_size(parameter: Tensor, dim: int) -> int:
    """Entries of the whole parameter along a dimension."""
    split = split_of(parameter)
    return parameter.shape[dim] if split is None or split.dim != dim else split.whole_size


def _merged(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same entries, in as few ranges as can be."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        if start < stop:
            merged.append((start, stop))
    return tuple(merged)
