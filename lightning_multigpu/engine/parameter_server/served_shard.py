"""The shard of an optimizer that a parameter server holds, and its updates."""

from __future__ import annotations

import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_multigpu.communication.shared_memory.segment import OfferedSegment
from lightning_multigpu.engine.parameter_server.pair import Pair, Room, offered
from lightning_multigpu.placement.owned_part import OwnedPart, clip
from lightning_multigpu.placement.owned_step import Update
from lightning_multigpu.placement.table import Split

if TYPE_CHECKING:
    from lightning_multigpu.engine.parameter_server.server import Job


class UpdateError(RuntimeError):
    """Workers ask for what cannot be done together, or the optimizer's step has failed."""


@dataclass(frozen=True)
class Plan:
    """New parameters of an optimizer, as one server has them; the same on all workers, but for their contents.

    Attributes:
        kind: the optimizer's class.
        split: what the servers divide.
        parts: number, dtype, and the shapes of the pieces, which lie one after the other.
        groups: for each group of the optimizer the part and the place in it of all its pieces, in their order.
        weights: of each part, flat; worker 0 alone sends this and what follows.
        defaults: of the optimizer.
        values: of each group.
        states: of pieces with which the optimizer begins, by part and place.
    """

    kind: type[Optimizer]
    split: Split
    parts: list[tuple[int, torch.dtype, list[torch.Size]]]
    groups: list[list[tuple[int, int]]]
    weights: list[Tensor] = field(default_factory=list, compare=False)
    defaults: dict[str, Any] = field(default_factory=dict, compare=False)
    values: list[dict[str, Any]] = field(default_factory=list, compare=False)
    states: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Request:
    """A worker's request for an update.

    Attributes:
        update: what is asked for. Where gradients are averages, worker 0 alone pushes them.
        pushed: of each part that is pushed and pulled: how often it was pushed, and which pieces have a gradient.
        values: of each group, from worker 0.
    """

    update: Update
    pushed: dict[int, tuple[int, list[bool]]]
    values: list[dict[str, Any]]

    def common(self) -> tuple[Any, ...]:
        """What all workers must ask for together."""
        return self.update, [*self.pushed]


@dataclass(eq=False)
class _Part:
    """Pieces of parameters that travel together, one after the other in flat memory.

    Attributes:
        rooms: for each worker.
        version: the updates that it has been through.
        pulled: the version that each worker has.
    """

    weights: Tensor
    pieces: list[Parameter]
    rooms: dict[int, Room] = field(default_factory=dict)
    version: int = 0
    pulled: dict[int, int] = field(default_factory=dict)


class Clocks:
    """The steps of each asynchronous worker, by which workers that are too far ahead wait.

    Source: Q. Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS 2013.

    Args:
        workers: that are there from the beginning.
        max_staleness: how many steps a worker may be ahead of the slowest one; None for any number.
    """

    def __init__(self, workers: Iterable[int], max_staleness: int | None) -> None:
        self._steps = dict.fromkeys(workers, 0)
        self._max_staleness = max_staleness

    def leaves(self, worker: int) -> None:
        """Nobody waits for the worker until it completes a step again."""
        self._steps.pop(worker, None)

    def completes(self, worker: int) -> None:
        """The worker has completed a step; one that comes back begins beside the slowest of the others."""
        self._steps.setdefault(worker, min(self._steps.values(), default=0))
        self._steps[worker] += 1

    def may_go_on(self, worker: int) -> bool:
        """Whether the worker may begin its next step when the present one is done."""
        if self._max_staleness is None or worker not in self._steps or len(self._steps) == 1:
            return True
        slowest = min(steps for other, steps in self._steps.items() if other != worker)
        return self._steps[worker] + 1 - slowest <= self._max_staleness


class ServedShard:
    """The shard of one optimizer: its pieces of parameters, and their updates.

    Args:
        pairs: the connections to the workers, by their numbers.
        changing: held while a worker changes what others may wait for.

    Attributes:
        staleness: how often the updates of each asynchronous worker had which staleness: the number of updates that
            others had made since the worker got the weights.
    """

    def __init__(self, pairs: Mapping[int, Pair], job: Job, changing: threading.Condition) -> None:
        self._pairs, self._job, self._changing = pairs, job, changing
        self._clocks = Clocks(pairs, job.max_staleness)
        self.staleness: dict[int, Counter[int]] = defaultdict(Counter)
        self.plans: list[Plan] = []
        self._parts: dict[int, _Part] = {}
        self._offered: list[OfferedSegment | None] = []
        self._kept: dict[int, list[OfferedSegment]] = defaultdict(list)
        self._part: OwnedPart  # from the first plan on

    # Parameters

    def place(self, plan: Plan) -> None:
        """Takes new parameters, from worker 0."""
        self._offered.append(None)
        flats = plan.weights
        if self._job.is_synchronous and any(pair.shares_memory for pair in self._pairs.values()):
            # Workers of this host read the weights in it.
            self._offered[-1], shared = offered(flats)
            flats = [copy.copy_(flat) for copy, flat in zip(shared, flats, strict=True)]
        for flat, (number, _, shapes) in zip(flats, plan.parts, strict=True):
            pieces = flat.split([shape.numel() for shape in shapes])  # type: ignore[no-untyped-call]
            shaped = [Parameter(piece.view(shape), False) for piece, shape in zip(pieces, shapes, strict=True)]
            self._parts[number] = _Part(flat, shaped)
        self.plans.append(replace(plan, weights=[], states={}))  # which are in use from here on
        groups = [{**group, "params": pieces} for group, pieces in zip(plan.values, self._held(), strict=True)]
        if len(self.plans) == 1:
            optimizer = plan.kind.__new__(plan.kind)
            # As if it were unpickled, which any optimizer knows how to be; its constructor may want what it likes.
            optimizer.__setstate__({"defaults": plan.defaults, "state": defaultdict(dict), "param_groups": groups})
            self._part = OwnedPart(optimizer)
        else:
            self._part.optimizer.param_groups = groups
        for (number, index), state in plan.states.items():
            self._part.states[self._parts[number].pieces[index]] = state

    def _held(self) -> list[list[Parameter]]:
        return [[self._parts[number].pieces[index] for number, index in group] for group in self.plans[-1].groups]

    def welcome(self, worker: int, number: int, plan: Plan) -> list[Any] | None:
        """Makes the rooms between this server and a worker for the parts of the worker's plan of a number.

        Returns:
            The memory of pushed and of pulled tensors, as a worker of this host maps it; None for other workers.

        Raises:
            UpdateError: worker 0 has another plan.
        """
        if plan != self.plans[number]:
            raise UpdateError(
                f"worker {worker} has other parameters, or another optimizer, than worker 0: build the model alike on "
                "all workers"
            )
        pair, parts = self._pairs[worker], [self._parts[part] for part, _, _ in plan.parts]
        weights = [part.weights for part in parts]
        offers = None
        if pair.shares_memory:
            segment, pushed = offered(weights)
            pulled_segment, pulled = self._offered[number], weights
            if pulled_segment is None:
                pulled_segment, pulled = offered(weights)
            self._kept[worker] += [segment, pulled_segment]
            offers = [segment.offer, pulled_segment.offer]
        else:
            pushed = [torch.empty_like(flat) for flat in weights]
            pulled = weights if self._job.is_synchronous else [torch.empty_like(flat) for flat in weights]
        for part, (name, _, _), out, into in zip(parts, plan.parts, pulled, pushed, strict=True):
            part.rooms[worker] = Room(pair, name, out, into)
        return offers

    # Updates

    def update(self, requests: Mapping[int, Request]) -> int:
        """Makes an update with the gradients of all synchronous workers, or of one asynchronous worker.

        Gradients are summed in the order of workers, so that a run repeats bit for bit. Those of an asynchronous
        worker may belong to weights that are not the newest. Returns when the workers have got the weights.

        Returns:
            The version of the weights that the workers get.

        Raises:
            UpdateError: workers ask for different things, or the step has failed.
        """
        worker = min(requests)
        first = requests[worker]
        if others := [request for request in requests.values() if request.common() != first.common()]:
            raise UpdateError(
                f"workers ask for different steps: {first.common()}, {others[0].common()}; register hooks that read "
                "gradients before a step, and change optimizer.state, on all workers"
            )
        if worker == 0:
            with self._changing:
                self._take_values(first.values)
        at_once = self.plans[-1].split == "nothing" or first.update.clip_norm is not None  # they relate all parts
        staleness, sent, numbers = 0, [], [*first.pushed]
        for together in [numbers] if at_once else [[number] for number in numbers]:
            parts = [self._parts[number] for number in together]
            found: dict[Parameter, Tensor] = {}
            for number in together:
                found.update(self._gradients(number, requests))
            self._clip(found.values(), first.update, self._pairs[worker])
            with self._changing:  # after the updates of other workers
                staleness = max([staleness, *(part.version - part.pulled.get(worker, 0) for part in parts)])
                self._step(found)
                for part in parts:
                    part.version += 1
                self._changing.wait_for(lambda: self._clocks.may_go_on(worker))
                sent += self._send(parts, requests)
        with self._changing:
            if not self._job.is_synchronous:
                self.staleness[worker][staleness] += 1
            self._clocks.completes(worker)
            self._changing.notify_all()
        return self._await(sent)

    def _gradients(self, number: int, requests: Mapping[int, Request]) -> dict[Parameter, Tensor]:
        """The average of what workers push of a part, for the pieces of which one of them has a gradient."""
        part = self._parts[number]
        for worker, request in requests.items():
            for _ in range(request.pushed[number][0]):  # each push takes the place of the one before
                part.rooms[worker].take()
        first = min(requests)
        givers = {first: requests[first]} if requests[first].update.is_whole else requests
        flats = [part.rooms[worker].into for worker in givers]
        total = flats[0]  # in the first worker's memory: it pushes again when it has the new weights
        for flat in flats[1:]:
            total += flat
        if len(flats) > 1:
            total /= len(flats)
        present = map(any, zip(*(request.pushed[number][1] for request in givers.values()), strict=True))
        gradients = total.split([piece.numel() for piece in part.pieces])  # type: ignore[no-untyped-call]
        return {
            piece: gradient.view(piece.shape)
            for piece, gradient, is_there in zip(part.pieces, gradients, present, strict=True)
            if is_there
        }

    def _clip(self, gradients: Iterable[Tensor], update: Update, pair: Pair) -> None:
        """Clips by value, or by the norm over all servers, which ``pair``'s worker adds up."""

        def reduce_sum(squares: Tensor) -> Tensor | float:
            if self._job.num_servers == 1:
                return squares
            pair.send(float(squares))
            return float(pair.receive())

        clip(gradients, update.clip_value, update.clip_norm, reduce_sum)

    def _take_values(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Takes the values of worker 0's groups, which hold for all workers."""
        for group, of_group in zip(self._part.optimizer.param_groups, values, strict=True):
            group.update(of_group)

    @torch.no_grad()
    def _step(self, found: Mapping[Parameter, Tensor]) -> None:
        """The optimizer's step with these gradients.

        Raises:
            UpdateError: it has failed, or it has changed values of its groups, which the next step gets from worker 0.
        """
        optimizer = self._part.optimizer
        held = [[piece for piece in group if piece in found] for group in self._held()]
        if not any(held):
            return
        values = [dict(group) for group in optimizer.param_groups]
        try:
            self._part.update(held, found)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            raise UpdateError(f"the step of {type(optimizer).__name__} has failed on the server:\n{text}") from error
        for before, now in zip(values, optimizer.param_groups, strict=True):
            changed = [name for name, value in now.items()
                       if value is not before.get(name) and repr(value) != repr(before.get(name))]  # fmt: skip
            if changed:
                raise UpdateError(
                    f"{type(optimizer).__name__} changes {', '.join(map(repr, changed))} of its groups in its "
                    "step, and servers take these values from rank 0 in each step: use strategy='cpu_ps'"
                )

    def _send(self, parts: Iterable[_Part], workers: Iterable[int]) -> list[tuple[Callable[[], None], int]]:
        """Begins to send weights to workers; asynchronous ones get copies, since others update them meanwhile.

        Returns:
            What waits until a part is sent, and the version of it.
        """
        sent = []
        for part in parts:
            for worker in workers:
                room = part.rooms[worker]
                if room.out is not part.weights:
                    room.out.copy_(part.weights)
                sent.append((room.begin_to_send(), part.version))
                part.pulled[worker] = part.version
        return sent

    def _await(self, sent: Iterable[tuple[Callable[[], None], int]]) -> int:
        """Waits until weights are sent; returns their version."""
        version = 0
        for wait, of_part in sent:
            wait()
            version = max(version, of_part)
        return version

    def pull(self, worker: int) -> int:
        """Sends all weights to a worker; returns their version."""
        with self._changing:
            sent = self._send(self._parts.values(), [worker])
        return self._await(sent)

    def replace(self, number: int, weights: Tensor) -> None:
        """Takes weights of a part that have changed on worker 0."""
        self._parts[number].weights.copy_(weights)

    def pauses(self, worker: int) -> None:
        """Lets workers go on without waiting for this one until it pushes again; it may be validating."""
        self._clocks.leaves(worker)
        self._changing.notify_all()

    def loses(self, worker: int) -> None:
        """Forgets a worker that has left, and frees the memory that it shared."""
        self._kept.pop(worker, None)
        for part in self._parts.values():
            part.rooms.pop(worker, None)
        self.pauses(worker)

    # Checkpoints

    def state(self) -> dict[tuple[int, int], dict[str, Any]]:
        """The optimizer's state of each piece, by part and place."""
        return {
            (number, index): state
            for number, part in self._parts.items()
            for index, piece in enumerate(part.pieces)
            if (state := self._part.states.get(piece))
        }

    def load(self, values: Sequence[Mapping[str, Any]], states: Mapping[tuple[int, int], Mapping[str, Any]]) -> None:
        """Takes state as :meth:`state` returns it, and values of the groups."""
        found = {self._parts[number].pieces[index]: state for (number, index), state in states.items()}
        self._part.load(values, found, self._held())
