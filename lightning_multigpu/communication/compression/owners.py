"""Which rank sums which parameter, where whole parameters are dealt out."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_multigpu.communication.compression.pieces import Pieces, offsets
from lightning_multigpu.communication.compression.powersgd import PowerSGD


@dataclass(frozen=True)
class Part:
    """A parameter in the flat tensor, its owner, and where its numbers lie in the owner's first and second message."""

    name: str
    start: int
    stop: int
    owner: int
    first: slice
    second: slice
    size: tuple[int, int] | None
    """Rows and columns, or None where it travels as it is."""


@dataclass(frozen=True)
class Plan:
    """Who owns which parameter of one flat tensor, and how long the messages about them are, by owner."""

    parts: tuple[Part, ...]
    first_numel: tuple[int, ...]
    second_numel: tuple[int, ...]

    def sent_bytes(self, rank: int) -> int:
        """What ``rank`` sends: what others own once, what it owns itself to every other rank."""
        totals = [4 * (first + second) for first, second in zip(self.first_numel, self.second_numel, strict=True)]
        return sum(totals) - totals[rank] + (len(totals) - 1) * totals[rank]


class Owners:
    """Deals parameters out to ranks: each to the one that has the least to send so far. Deterministic.

    A tensor keeps its plan; the ranks agree because all see the same tensors in the same order.
    """

    def __init__(self, compressor: PowerSGD, world_size: int) -> None:
        self._compressor = compressor
        self._loads = [0] * world_size
        self._plans: dict[Pieces, Plan] = {}

    def plan(self, pieces: Pieces) -> Plan:
        """The plan of the flat tensor of these pieces."""
        found = self._plans.get(pieces)
        if found is None:
            found = self._plans[pieces] = self._new_plan(pieces)
        return found

    def _new_plan(self, pieces: Pieces) -> Plan:
        first, second = [0] * len(self._loads), [0] * len(self._loads)
        parts = []
        for piece, start in zip(pieces, offsets(pieces), strict=False):
            size = self._compressor.factors(piece)
            rows, columns = (piece.numel, 0) if size is None else size
            rank = 1 if size is None else self._compressor.rank
            owner = self._loads.index(min(self._loads))
            first_end, second_end = first[owner] + rank * rows, second[owner] + rank * columns
            parts.append(Part(piece.name, start, start + piece.numel, owner, slice(first[owner], first_end),
                              slice(second[owner], second_end), size))  # fmt: skip
            first[owner], second[owner] = first_end, second_end
            self._loads[owner] += rank * (rows + columns)
        return Plan(tuple(parts), tuple(first), tuple(second))
