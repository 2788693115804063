"""Pieces of a flat tensor of gradients: the parameters in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class GradientPiece:
    """A parameter's gradient, or a part of it, within a flat tensor.

    Args:
        name: the parameter's name; the same on every rank, whatever the buckets are.
        start: the piece's first element in the flattened parameter.
        stop: one past the piece's last element; by default the parameter's end.

    Raises:
        ValueError: ``start`` and ``stop`` are no range within the parameter.
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0
    stop: int = -1

    def __post_init__(self) -> None:
        if self.stop == -1:
            object.__setattr__(self, "stop", self.parameter_numel)
        if not 0 <= self.start <= self.stop <= self.parameter_numel:
            raise ValueError(
                f"elements {self.start} to {self.stop} of {self.name!r}: "
                f"a piece lies within its parameter's {self.parameter_numel} elements"
            )

    @property
    def parameter_numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def numel(self) -> int:
        """Elements of this piece."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole parameter."""
        return self.numel == self.parameter_numel


Pieces = tuple[GradientPiece, ...]
"""The pieces of a flat tensor, in order."""


def offsets(pieces: Iterable[GradientPiece]) -> list[int]:
    """The start of each piece in the flat tensor, and the end of the last one."""
    return list(accumulate((piece.numel for piece in pieces), initial=0))


def cut(pieces: Sequence[GradientPiece], start: int, stop: int) -> Pieces:
    """The pieces of ``tensor[start:stop]``, if ``pieces`` are the pieces of the flat ``tensor``."""
    found = []
    for piece, (a, b) in zip(pieces, pairwise(offsets(pieces)), strict=True):
        first, last = max(a, start), min(b, stop)
        if first < last:
            found.append(GradientPiece(piece.name, piece.shape, piece.start + first - a, piece.start + last - a))
    return tuple(found)
