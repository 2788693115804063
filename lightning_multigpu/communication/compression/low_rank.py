"""The all-reduce of PowerSGD: every matrix has an owner, which sums its factors and sends the sums to all.

::

    every rank    P = M Q            to the owner of the matrix
    owner         sum of P, orthonormalised            to all
    every rank    Q = transpose(P) M                   to the owner
    owner         sum of Q                             to all
    every rank    the sum of M is P Q, the error M - P (own Q)

Here Q is stored as (rank, columns). What is no matrix travels with P, as it is. Whole parameters are dealt out to
owners: a matrix that were cut would lose its rank. All use the factors that the owner sent, so that all hold the same
bits, and the sums are made in one order.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.compression.compression_statistics import CompressionStatistics
from lightning_multigpu.communication.compression.owner_messages import (
    FROM_OWNER,
    SECOND_FROM_OWNER,
    SECOND_TO_OWNER,
    TO_OWNER,
    Messages,
    wait_all,
)
from lightning_multigpu.communication.compression.owners import Part, Plan
from lightning_multigpu.communication.compression.powersgd import add_product, orthonormalise
from lightning_multigpu.communication.compression.warm_starts import WarmStarts


class LowRank:
    """One all-reduce under way: :meth:`send_parts` has started it, :meth:`finish` ends it.

    Args:
        values: flat float32; becomes the sum or the average.
        errors: flat float32: those to add, and where those of this step go.
    """

    def __init__(
        self,
        messages: Messages,
        plan: Plan,
        warm_starts: WarmStarts,
        statistics: CompressionStatistics,
        values: Tensor,
        errors: tuple[Tensor, Tensor],
        average: bool,
    ) -> None:
        self._messages = messages
        self._plan = plan
        self._warm_starts = warm_starts
        self._statistics = statistics
        self._values = values
        self._given = torch.add(values, errors[0], out=errors[1])  # becomes the error of this step
        self._average = average
        self._first = _Round(messages, plan.first_numel, TO_OWNER, FROM_OWNER)
        self._second = _Round(messages, plan.second_numel, SECOND_TO_OWNER, SECOND_FROM_OWNER)

    def send_parts(self) -> None:
        """Makes this rank's factors P and starts to send them."""
        for part in self._plan.parts:
            numbers = self._first.numbers[part.owner][part.first]
            given = self._given[part.start : part.stop]
            if part.size is None:
                numbers.copy_(given)
            else:
                start = self._warm_starts.get(part.name, part.size[1])
                torch.mm(given.view(part.size), start.t(), out=numbers.view(part.size[0], -1))
        self._first.send_parts()

    def finish(self) -> bool:
        """The rest of both rounds; returns whether everything that was sent is finite."""
        own = self._messages.rank
        total = self._first.sum_parts()
        for part in self._plan.parts:
            if part.owner == own and part.size is not None:
                orthonormalise(total[part.first].view(part.size[0], -1))
            elif part.owner == own and self._average:
                total[part.first].div_(self._messages.world_size)
        self._first.exchange_sums()
        for part in self._plan.parts:
            self._take_away(part)
        self._second.send_parts()
        total = self._second.sum_parts()
        if self._average:
            total.div_(self._messages.world_size)
        self._second.exchange_sums()
        for part in self._plan.parts:
            self._put_together(part)
        self._first.wait_for_sends()
        self._second.wait_for_sends()
        return self._first.is_finite() and self._second.is_finite()

    def _take_away(self, part: Part) -> None:
        """Makes this rank's Q, and takes what the factors say of its gradients away from them."""
        given = self._given[part.start : part.stop]
        if part.size is None:
            given.zero_()
            return
        had_square = self._statistics.square(given)
        p = self._first.numbers[part.owner][part.first].view(part.size[0], -1)
        q = self._second.numbers[part.owner][part.second].view(-1, part.size[1])
        torch.mm(p.t(), given.view(part.size), out=q)
        add_product(given.view(part.size), p, q, factor=-1.0)
        self._statistics.add_loss(had_square, given)

    def _put_together(self, part: Part) -> None:
        values = self._values[part.start : part.stop]
        first = self._first.numbers[part.owner][part.first]
        if part.size is None:
            values.copy_(first)
            return
        q = self._second.numbers[part.owner][part.second].view(-1, part.size[1])
        values.zero_()
        add_product(values.view(part.size), first.view(part.size[0], -1), q)
        self._warm_starts.put(part.name, q)


class _Round:
    """Numbers for each owner, which it sums and sends back; nothing is sent about owners of nothing."""

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
        """The sums that this rank owns; they may be changed until :meth:`exchange_sums`."""
        own = self.numbers[self._messages.rank]
        for peer in sorted(self._parts):
            self._arrivals[peer].wait()
            own.add_(self._parts[peer])
        return own

    def exchange_sums(self) -> None:
        """Every rank's numbers become the sums."""
        messages = self._messages
        wait_all(self._sends)  # what has been sent is about to be overwritten
        self._sends = [messages.send(self.numbers[messages.rank], peer, self._from_owner) for peer in self._parts]
        wait_all(
            [
                messages.receive(self.numbers[peer], peer, self._from_owner)
                for peer in messages.peers
                if self.numbers[peer].numel()
            ]
        )

    def wait_for_sends(self) -> None:
        """Waits until all is sent: a message whose work is dropped before may never arrive."""
        wait_all(self._sends)

    def is_finite(self) -> bool:
        """Whether all sums are."""
        return all(bool(numbers.isfinite().all()) for numbers in self.numbers)
