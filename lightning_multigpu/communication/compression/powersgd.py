"""PowerSGD: a matrix of gradients is sent as two thin factors, from one power iteration in each training step.

Source: T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: practical low-rank gradient compression for distributed
optimization", NeurIPS 2019, algorithm 1. With M the gradients of a rank and Q the result of the previous step::

    P = M Q              summed over the ranks, then orthonormalised
    Q = transpose(M) P   averaged over the ranks
    the average of M is taken to be P transpose(Q); a rank keeps the error M - P transpose(its own Q)

Every matrix has an owner: a rank that sums the matrix's factors and sends the sums to all. Q is stored as (rank,
columns)::

    every rank    P = M Q            to the owner of the matrix
    owner         sum of P, orthonormalised            to all
    every rank    Q = transpose(P) M                   to the owner
    owner         sum of Q                             to all
    every rank    the sum of M is P Q, the error M - P (own Q)

Other parameters are sent uncompressed, with P. Owners have whole parameters, since a part of a matrix has other
factors. All ranks use the owner's factors, and sums are made in one order, so that all ranks get the same bits.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.compression.compressors import Compressor, require_int
from lightning_multigpu.communication.compression.owner_summed import (
    FROM_OWNER,
    SECOND_FROM_OWNER,
    SECOND_TO_OWNER,
    TO_OWNER,
    wait_all,
)
from lightning_multigpu.communication.compression.pieces import GradientPiece, Pieces, offsets
from lightning_multigpu.communication.ring import Messages

_RANKS_BY_OUTER_PRODUCTS = 4  # up to this rank a sum of outer products is faster than a matrix product


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Sends matrices as two factors of low rank; biases and small matrices are not compressed.

    In a tensor of more than two dimensions, the first one gives the rows and the others the columns.

    Args:
        rank: the factors' rank: an (m, n) matrix becomes ``rank * (m + n)`` numbers.
        start_step: the first compressed step: early gradients change fast.

    Raises:
        ValueError: ``rank`` is no integer of 1 or more, or ``start_step`` none of 0 or more.
    """

    rank: int = 4
    start_step: int = 10

    name = "powersgd"
    has_error_feedback = True

    def __post_init__(self) -> None:
        require_int("rank", self.rank, at_least=1, why="a product of factors has at least rank 1")
        require_int("start_step", self.start_step, at_least=0, why="it is the first step that is compressed")

    def factors(self, piece: GradientPiece) -> tuple[int, int] | None:
        """Rows and columns of the piece as a matrix; None if factors would not be smaller, or the piece is a part."""
        if len(piece.shape) < 2 or not piece.is_whole or not piece.numel:
            return None
        rows, columns = piece.shape[0], math.prod(piece.shape[1:])
        return (rows, columns) if self.rank * (rows + columns) < rows * columns else None


@dataclass(frozen=True)
class Part:
    """A parameter in the flat tensor, its owner, and its slices of the owner's first and second message."""

    name: str
    start: int
    stop: int
    owner: int
    first: slice
    second: slice
    size: tuple[int, int] | None
    """Rows and columns; None if it is not compressed."""


@dataclass(frozen=True)
class OwnerPlan:
    """The owner of each parameter of a flat tensor, and the lengths of the messages, by owner."""

    parts: tuple[Part, ...]
    first_numel: tuple[int, ...]
    second_numel: tuple[int, ...]

    def sent_bytes(self, rank: int) -> int:
        """Bytes that ``rank`` sends: every other owner's parts once, its own parts to every other rank."""
        totals = [4 * (first + second) for first, second in zip(self.first_numel, self.second_numel, strict=True)]
        return sum(totals) - totals[rank] + (len(totals) - 1) * totals[rank]


class Owners:
    """Assigns each parameter to the rank with the least to send so far.

    A tensor keeps its plan. All ranks make the same plans, because they see the same tensors in the same order.
    """

    def __init__(self, compressor: PowerSGD, world_size: int) -> None:
        self._compressor = compressor
        self._loads = [0] * world_size
        self._plans: dict[Pieces, OwnerPlan] = {}

    def plan(self, pieces: Pieces) -> OwnerPlan:
        """The plan for the flat tensor of these pieces."""
        found = self._plans.get(pieces)
        if found is None:
            found = self._plans[pieces] = self._new_plan(pieces)
        return found

    def _new_plan(self, pieces: Pieces) -> OwnerPlan:
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
        return OwnerPlan(tuple(parts), tuple(first), tuple(second))


class WarmStarts:
    """The factor Q of each matrix, the start of its next power iteration; the same on every rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._factors: dict[str, Tensor] = {}
        self._of_this_step: dict[str, Tensor] = {}

    def get(self, name: str, columns: int) -> Tensor:
        """The factor, (rank, columns)."""
        if name not in self._factors:
            self._factors[name] = first_factor(name, self._rank, columns)
        return self._factors[name]

    def put(self, name: str, factor: Tensor) -> None:
        """Sets the factor for the next step, if this step is accepted; normalised, since its length would grow."""
        norm = torch.linalg.vector_norm(factor)
        if norm > 0:
            self._of_this_step[name] = factor / norm

    def end_step(self, *, accept: bool) -> None:
        """Keeps or drops the factors of the step."""
        if accept:
            self._factors.update(self._of_this_step)
        self._of_this_step = {}


@dataclass
class LowRank:
    """One all-reduce: :meth:`send_parts` starts it, :meth:`finish` ends it.

    Attributes:
        values: flat float32; becomes the sum or the average.
        errors: flat float32: the errors to add, and the memory for the errors of this step.
    """

    messages: Messages
    plan: OwnerPlan
    warm_starts: WarmStarts
    values: Tensor
    errors: tuple[Tensor, Tensor]
    average: bool

    def __post_init__(self) -> None:
        self._given = torch.add(self.values, self.errors[0], out=self.errors[1])  # becomes the error of this step
        self._first = _Round(self.messages, self.plan.first_numel, TO_OWNER, FROM_OWNER)
        self._second = _Round(self.messages, self.plan.second_numel, SECOND_TO_OWNER, SECOND_FROM_OWNER)

    def send_parts(self) -> None:
        """Makes this rank's factors P and starts to send them."""
        for part in self.plan.parts:
            numbers = self._first.numbers[part.owner][part.first]
            given = self._given[part.start : part.stop]
            if part.size is None:
                numbers.copy_(given)
            else:
                start = self.warm_starts.get(part.name, part.size[1])
                torch.mm(given.view(part.size), start.t(), out=numbers.view(part.size[0], -1))
        self._first.send_parts()

    def finish(self) -> bool:
        """Ends both rounds; returns whether all sent values are finite."""
        own = self.messages.rank
        total = self._first.sum_parts()
        for part in self.plan.parts:
            if part.owner == own and part.size is not None:
                orthonormalise(total[part.first].view(part.size[0], -1))
            elif part.owner == own and self.average:
                total[part.first].div_(self.messages.world_size)
        self._first.exchange_sums()
        for part in self.plan.parts:
            self._subtract_product(part)
        self._second.send_parts()
        total = self._second.sum_parts()
        if self.average:
            total.div_(self.messages.world_size)
        self._second.exchange_sums()
        for part in self.plan.parts:
            self._write_sum(part)
        self._first.wait_for_sends()
        self._second.wait_for_sends()
        return self._first.is_finite() and self._second.is_finite()

    def _subtract_product(self, part: Part) -> None:
        """Makes this rank's Q, and subtracts the product of the factors from the gradients."""
        given = self._given[part.start : part.stop]
        if part.size is None:
            given.zero_()
            return
        p = self._first.numbers[part.owner][part.first].view(part.size[0], -1)
        q = self._second.numbers[part.owner][part.second].view(-1, part.size[1])
        torch.mm(p.t(), given.view(part.size), out=q)
        add_product(given.view(part.size), p, q, factor=-1.0)

    def _write_sum(self, part: Part) -> None:
        values = self.values[part.start : part.stop]
        first = self._first.numbers[part.owner][part.first]
        if part.size is None:
            values.copy_(first)
            return
        q = self._second.numbers[part.owner][part.second].view(-1, part.size[1])
        values.zero_()
        add_product(values.view(part.size), first.view(part.size[0], -1), q)
        self.warm_starts.put(part.name, q)


class _Round:
    """Numbers for each owner, which sums them and sends the sums back; owners without parts get no message."""

    def __init__(self, messages: Messages, numels: tuple[int, ...], to_owner: int, from_owner: int) -> None:
        self.numbers = [torch.empty(numel) for numel in numels]
        self._messages = messages
        self._to_owner, self._from_owner = to_owner, from_owner
        self._sends: list[dist.Work] = []
        own = self.numbers[messages.rank]
        self._parts = {peer: torch.empty_like(own) for peer in messages.peers} if own.numel() else {}
        self._arrivals = {peer: messages.receive(part, peer, to_owner) for peer, part in self._parts.items()}

    def send_parts(self) -> None:
        for peer in self._messages.peers:
            if self.numbers[peer].numel():
                self._sends.append(self._messages.send(self.numbers[peer], peer, self._to_owner))

    def sum_parts(self) -> Tensor:
        """The sums that this rank owns; the caller may change them until :meth:`exchange_sums`."""
        own = self.numbers[self._messages.rank]
        for peer in sorted(self._parts):
            self._arrivals[peer].wait()
            own.add_(self._parts[peer])
        return own

    def exchange_sums(self) -> None:
        """Sends this rank's sums, and replaces the numbers of the other owners by their sums."""
        messages = self._messages
        wait_all(self._sends)  # the sent memory is overwritten next
        self._sends = [messages.send(self.numbers[messages.rank], peer, self._from_owner) for peer in self._parts]
        wait_all(
            [
                messages.receive(self.numbers[peer], peer, self._from_owner)
                for peer in messages.peers
                if self.numbers[peer].numel()
            ]
        )

    def wait_for_sends(self) -> None:
        """Waits until all messages are sent: a message may never arrive if its work is dropped earlier."""
        wait_all(self._sends)

    def is_finite(self) -> bool:
        """Whether all sums are finite."""
        return all(bool(numbers.isfinite().all()) for numbers in self.numbers)


def first_factor(name: str, rank: int, columns: int) -> Tensor:
    """The start of a parameter's power iteration, (rank, columns): random numbers that depend on its name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
    return torch.randn(rank, columns, generator=torch.Generator().manual_seed(seed))


def orthonormalise(factor: Tensor) -> None:
    """Makes the columns of ``factor`` (rows, rank) orthonormal, in place; all NaN if it is not finite."""
    if factor.isfinite().all():
        factor.copy_(torch.linalg.qr(factor).Q)
    else:
        factor.fill_(math.nan)


def add_product(matrix: Tensor, left: Tensor, right: Tensor, *, factor: float = 1.0) -> None:
    """Adds ``factor * left @ right`` to ``matrix`` (rows, columns); ``left`` is (rows, rank)."""
    rank = right.shape[0]
    if rank > _RANKS_BY_OUTER_PRODUCTS:
        matrix.addmm_(left, right, alpha=factor)
        return
    for column, row in zip(left.unbind(1), right.unbind(0), strict=True):
        matrix.addr_(column, row, alpha=factor)
