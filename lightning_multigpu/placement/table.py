"""The table of a model's tensors: which owner updates which elements, and where these lie in flat memory.

An owner is a rank or a server. The tensors of one dtype lie one after the other in a flat tensor, and each owner has
one part of it. What may be cut follows from the optimizer. With three owners, and tensors a to d::

    "elements"   | a a a a b b | b b b b b c | c c d d d d |      even parts: tensors are cut where a part ends
    "tensors"    | b b b b b b b | a a a a c c c | d d d d |      whole tensors, the largest first to the emptiest part
    "nothing"    | a a a a b b b b b b b c c c d d d d |  |  |    one owner has all

The rows are :class:`Piece`; functions cut tensors, and states of optimizers, by rows, fill them, and join them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, optim
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

Split = Literal["elements", "tensors", "nothing"]

# An element's new value depends on the history of that element alone.
_ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
)
# An element's new value depends on the whole tensor: its rows and columns, its norm.
_TENSORWISE = (optim.Adafactor, optim.Muon)


def split_of(optimizer: Optimizer) -> Split:
    """How the parameters of ``optimizer`` can be divided so that its update stays the same.

    Only torch's own classes are known. Another class, or a subclass, may relate any two parameters.
    """
    if type(optimizer) in _ELEMENTWISE:
        return "elements"
    return "tensors" if type(optimizer) in _TENSORWISE else "nothing"


def as_dense(gradient: Tensor, optimizer: Optimizer) -> Tensor:
    """A gradient in the dense form in which owners update.

    Raises:
        ValueError: it is sparse, and the optimizer may update only the rows that a sparse gradient has.
    """
    if gradient.is_sparse and split_of(optimizer) != "elements":
        raise ValueError(
            f"{type(optimizer).__name__} has sparse gradients, which owners update as dense ones, in all rows: use "
            "SGD or Adagrad, sparse=False with Adam, or strategy='ring_ddp'"
        )
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


class Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of the tensor ``number``; they begin at ``offset`` of the flat tensor."""

    number: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def end(self) -> int:
        """One past the last element in the flat tensor."""
        return self.offset + self.numel


def elements(tensor: Tensor, piece: Piece) -> Tensor:
    """The elements of a piece: the tensor itself if they are all of it, else flat."""
    return tensor if piece.numel == tensor.numel() else tensor.reshape(-1)[piece.start : piece.stop]


def placed(flat: Tensor, piece: Piece, like: Tensor) -> Tensor:
    """The elements of a piece in flat memory: in the shape of the tensor ``like`` if they are all of it, else flat."""
    found = flat[piece.offset : piece.end]
    return found.view(like.shape) if piece.numel == like.numel() else found


def fill(tensor: Tensor, piece: Piece, values: Tensor) -> None:
    """Changes the elements of a piece to flat values."""
    whole = tensor.detach().contiguous()  # itself, but for layouts such as channels_last
    whole.view(-1)[piece.start : piece.stop].copy_(values)
    if whole.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(whole)


def part_of_state(state: Any, tensor: Tensor, piece: Piece) -> Any:
    """The part of a tensor's optimizer state that belongs to a piece; its tensors are copies."""

    def part_of(value: Tensor) -> Tensor:
        return (elements(value, piece) if value.shape == tensor.shape else value).detach().clone()

    return tree_map_only(Tensor, part_of, state)


def joined_state(states: Sequence[Mapping[str, Any]], tensor: Tensor) -> dict[str, Any]:
    """A tensor's optimizer state out of those of all its pieces, in their order."""

    def joined(values: Sequence[Any]) -> Any:
        first = values[0]
        if len(values) == 1 or not isinstance(first, Tensor) or first.dim() == 0:
            return first
        return torch.cat([value.reshape(-1) for value in values]).view(tensor.shape)

    return {name: joined([state[name] for state in states]) for name in states[0]}


class Layout:
    """The places of tensors in a flat tensor, and the servers' parts of it.

    There is a part for each owner; parts may be empty.

    Attributes:
        offsets: where each tensor begins in the flat tensor.
        bounds: first and one-past-last element of each owner's part; the parts follow one another.
    """

    def __init__(self, numels: Sequence[int], num_parts: int, split: Split) -> None:
        self.numels = list(numels)
        self.total = sum(numels)
        parts = _whole_tensors(numels, num_parts if split == "tensors" else 1)
        self.offsets = [0] * len(numels)
        ends, offset = [], 0
        for part in parts:
            for number in part:
                self.offsets[number] = offset
                offset += numels[number]
            ends.append(offset)
        ends += [offset] * (num_parts - len(ends))
        if split == "elements":
            ends = [-(-self.total * part // num_parts) for part in range(1, num_parts + 1)]
        self.bounds = list(pairwise([0, *ends]))

    def whole(self, number: int) -> Piece:
        """All of a tensor."""
        return Piece(number, 0, self.numels[number], self.offsets[number])

    def pieces(self, owner: int) -> list[Piece]:
        """What is in an owner's part, in its order."""
        first, last = self.bounds[owner]
        found = []
        for number, (offset, numel) in enumerate(zip(self.offsets, self.numels, strict=True)):
            start, stop = max(first, offset), min(last, offset + numel)
            if start < stop:
                found.append(Piece(number, start - offset, stop - offset, start))
        return sorted(found, key=lambda piece: piece.offset)


def bucket_parts(
    numels: Sequence[int], num_servers: int, split: Split, *, full_numel: float
) -> list[tuple[int, list[Piece]]]:
    """What travels together: a server, and its pieces of tensors, whose offsets begin at 0.

    The parts follow backward, which begins at the last tensor, so that the first ones can travel while it goes on.
    Where tensors can be cut, parts are even, of ``full_numel`` elements at most, and go to the servers in turn.
    Otherwise a part with ``full_numel`` elements takes no more tensors; where the update may relate any two parameters,
    one takes all.
    """
    last, found = len(numels) - 1, []
    if split == "elements":
        num_parts = num_servers * max(1, math.ceil(sum(numels) / full_numel / num_servers))
        backwards = Layout(numels[::-1], num_parts, split)
        for k in range(num_parts):
            pieces = [piece._replace(number=last - piece.number) for piece in backwards.pieces(k)]
            found.append((k % num_servers, pieces))
    for server, owned in enumerate(_whole_tensors(numels, num_servers if split == "tensors" else 1)):
        pieces = []
        for number in reversed(owned) if split != "elements" else ():
            pieces.append(Piece(number, 0, numels[number], 0))
            if number == owned[0] or (split == "tensors" and sum(piece.numel for piece in pieces) >= full_numel):
                found.append((server, pieces))
                pieces = []
    return [(server, from_0(pieces)) for server, pieces in found if pieces]


def from_0(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces one after the other; those of no elements stay, since an optimizer counts them too."""
    placed, offset = [], 0
    for piece in pieces:
        placed.append(piece._replace(offset=offset))
        offset += piece.numel
    return placed


def _whole_tensors(numels: Sequence[int], num_parts: int) -> list[list[int]]:
    """The numbers of the tensors of each part: the largest goes first, to the emptiest part."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    filled = [0] * num_parts
    for number in sorted(range(len(numels)), key=lambda number: -numels[number]):
        part = filled.index(min(filled))
        parts[part].append(number)
        filled[part] += numels[number]
    return [sorted(part) for part in parts]
