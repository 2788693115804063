"""The shard of an optimizer that a parameter server holds, and its updates."""

from __future__ import annotations

import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_multigpu.communication.shared_memory.segment import OfferedSegment
from lightning_multigpu.engine.parameter_server.pair import Pair
from lightning_multigpu.engine.parameter_server.rooms import Room, offered
from lightning_multigpu.placement.owned_part import OwnedPart, clip
from lightning_multigpu.placement.owned_step import Update
from lightning_multigpu.placement.table import Piece, Split, from_0, placed

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
        buckets: number, dtype, and the shapes of the pieces, which lie one after the other.
        groups: for each group of the optimizer the bucket and the place in it of all its pieces, in their order.
        weights: of each bucket, flat; worker 0 alone sends this and what follows.
        defaults: of the optimizer.
        values: of each group.
        states: of pieces with which the optimizer begins, by bucket and place.
    """

    kind: type[Optimizer]
    split: Split
    buckets: list[tuple[int, torch.dtype, list[torch.Size]]]
    groups: list[list[tuple[int, int]]]
    weights: list[Tensor] = field(default_factory=list, compare=False)
    defaults: dict[str, Any] = field(default_factory=dict, compare=False)
    values: list[dict[str, Any]] = field(default_factory=list, compare=False)
    states: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Pushed:
    """A worker's gradients of a bucket: how often they were pushed, and which pieces have one."""

    num_pushes: int
    present: list[bool]


@dataclass(frozen=True)
class Request:
    """A worker's request for an update, at the end of its round.

    Attributes:
        update: what is asked for. Where gradients are averages, worker 0 alone pushes them.
        pushed: the buckets that are pushed and pulled.
        values: of each group, from worker 0.
        weights: by bucket, weights that have changed on worker 0.
    """

    update: Update
    pushed: dict[int, Pushed]
    values: list[dict[str, Any]]
    weights: dict[int, Tensor]

    def common(self) -> tuple[Any, ...]:
        """What all workers must ask for together."""
        return self.update, [*self.pushed]


@dataclass(eq=False)
class _Bucket:
    """This server's part of a bucket: pieces of parameters, one after the other.

    Attributes:
        rooms: for each worker.
        version: the updates that it has been through.
        pulled: the version that each asynchronous worker has.
    """

    number: int
    weights: Tensor
    pieces: list[Parameter]
    rows: list[Piece]
    rooms: dict[int, Room] = field(default_factory=dict)
    version: int = 0
    pulled: dict[int, int] = field(default_factory=dict)

    def part(self, flat: Tensor, index: int) -> Tensor:
        """The elements of a piece, in its shape."""
        return placed(flat, self.rows[index], self.pieces[index])


@dataclass(frozen=True)
class _Gradients:
    """The gradients of a bucket for an update: flat, and which pieces have one."""

    bucket: _Bucket
    flat: Tensor
    present: list[bool]

    def found(self) -> dict[Parameter, Tensor]:
        pieces = enumerate(self.bucket.pieces)
        return {piece: self.bucket.part(self.flat, index) for index, piece in pieces if self.present[index]}


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

    Synchronous workers ask together, see :meth:`together`; asynchronous ones each for themselves, see :meth:`alone`.

    Args:
        pairs: the connections to the workers, by their numbers.
        changing: held while asynchronous workers change what others may wait for.

    Attributes:
        staleness: how often the updates of each asynchronous worker had which staleness: the number of updates that
            others had made since the worker got the weights.
    """

    def __init__(self, pairs: Mapping[int, Pair], job: Job, changing: threading.Condition) -> None:
        self._pairs, self._job, self._changing = pairs, job, changing
        self._clocks = Clocks(pairs, job.max_staleness)
        self.staleness: dict[int, Counter[int]] = defaultdict(Counter)
        self.plans: list[Plan] = []
        self._buckets: dict[int, _Bucket] = {}
        self._num_known = dict.fromkeys(pairs, 0)  # plans of each worker
        self._offered: list[OfferedSegment | None] = []
        self._kept: dict[int, list[OfferedSegment]] = defaultdict(list)
        self._part: OwnedPart | None = None

    # Parameters

    def place(self, plan: Plan) -> None:
        """Takes new parameters, from worker 0."""
        self._offered.append(None)
        flats = plan.weights
        if self._job.is_synchronous and any(pair.shares_memory for pair in self._pairs.values()):
            # Workers of this host read the weights in it.
            self._offered[-1], shared = offered(flats)
            flats = [copy.copy_(flat) for copy, flat in zip(shared, flats, strict=True)]
        for flat, (number, _, shapes) in zip(flats, plan.buckets, strict=True):
            rows = from_0(Piece(index, 0, shape.numel(), 0) for index, shape in enumerate(shapes))
            pieces = [Parameter(flat[row.offset : row.end].view(shape), requires_grad=False)
                      for row, shape in zip(rows, shapes, strict=True)]  # fmt: skip
            self._buckets[number] = _Bucket(number, flat, pieces, rows)
        self.plans.append(replace(plan, weights=[], states={}))  # which are in use from here on
        groups = [{**group, "params": pieces} for group, pieces in zip(plan.values, self._held(), strict=True)]
        if self._part is None:
            optimizer = plan.kind.__new__(plan.kind)
            # As if it were unpickled, which any optimizer knows how to be; its constructor may want what it likes.
            optimizer.__setstate__({"defaults": plan.defaults, "state": defaultdict(dict), "param_groups": groups})
            self._part = OwnedPart(optimizer)
        else:
            self._part.optimizer.param_groups = groups
        for (number, index), state in plan.states.items():
            self._part.states[self._buckets[number].pieces[index]] = state

    def _held(self) -> list[list[Parameter]]:
        return [[self._buckets[number].pieces[index] for number, index in group] for group in self.plans[-1].groups]

    def knows_more_than(self, worker: int) -> bool:
        """Whether worker 0 has told of parameters that the worker has not told of."""
        return len(self.plans) > self._num_known[worker]

    def welcome(self, worker: int, plan: Plan) -> list[Any] | None:
        """Makes the rooms between this server and a worker for the buckets of the worker's next plan.

        Returns:
            The memory of pushed and of pulled tensors, as a worker of this host maps it; None for other workers.

        Raises:
            UpdateError: worker 0 has another plan.
        """
        number, pair = self._num_known[worker], self._pairs[worker]
        if number >= len(self.plans) or plan != self.plans[number]:
            raise UpdateError(
                f"worker {worker} has other parameters, or another optimizer, than worker 0: build the model alike on "
                "all workers"
            )
        buckets = [self._buckets[bucket] for bucket, _, _ in plan.buckets]
        weights = [bucket.weights for bucket in buckets]
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
        for bucket, to_push, to_pull in zip(buckets, pushed, pulled, strict=True):
            bucket.rooms[worker] = Room(pair, bucket.number, to_push, to_pull)
            bucket.rooms[worker].expect_push()
        self._num_known[worker] = number + 1
        return offers

    # Updates

    def together(self, requests: Mapping[int, Request]) -> None:
        """Makes the update that all synchronous workers ask for; returns when all have got the weights.

        Gradients are summed in the order of workers, so that a run repeats bit for bit.

        Raises:
            UpdateError: workers ask for different things, or the step has failed.
        """
        first = requests[0]
        if others := [request for request in requests.values() if request.common() != first.common()]:
            raise UpdateError(
                f"workers ask for different steps: {first.common()}, {others[0].common()}; register hooks that read "
                "gradients before a step, and change optimizer.state, on all workers"
            )
        givers = {0: first} if first.update.is_whole else requests
        self._take_values(first)
        self.replace(first.weights)
        sent = []
        for together in self._portions(first):
            gradients = [self._gradients(bucket, givers) for bucket in together]
            self._clip(gradients, first.update, self._pairs[0])
            self._update(gradients)
            sent += [room.pull(bucket.weights) for bucket in together for room in bucket.rooms.values()]
        self._await(0, sent)

    def _await(self, worker: int, sent: Iterable[Any]) -> None:
        with self._pairs[worker].failing():
            for transfer in sent:
                transfer.wait()

    def _portions(self, request: Request) -> list[list[_Bucket]]:
        """The buckets that are updated at once: all of them where the update or the norm relates them."""
        buckets = [self._buckets[number] for number in request.pushed]
        at_once = self.plans[-1].split == "nothing" or request.update.clip_norm is not None
        return [buckets] if at_once else [[bucket] for bucket in buckets]

    def _gradients(self, bucket: _Bucket, givers: Mapping[int, Request]) -> _Gradients:
        """The average of what workers push of a bucket."""
        given = [request.pushed[bucket.number] for request in givers.values()]
        present = [any(of) for of in zip(*(pushed.present for pushed in given), strict=True)]
        flats = [self._pushed(bucket, worker, request) for worker, request in givers.items()]
        total = flats[0]  # in the first worker's memory: it pushes again when it has the new weights
        for flat in flats[1:]:
            total += flat
        if len(flats) > 1:
            total /= len(flats)
        for worker in givers:
            bucket.rooms[worker].expect_push()
        return _Gradients(bucket, total, present)

    def _pushed(self, bucket: _Bucket, worker: int, request: Request) -> Tensor:
        room = bucket.rooms[worker]
        room.take_pushes(request.pushed[bucket.number].num_pushes)
        return room.pushed

    def _clip(self, gradients: Sequence[_Gradients], update: Update, pair: Pair) -> None:
        """Clips by value, or by the norm over all servers, which ``pair``'s worker adds up."""

        def reduce_sum(squares: Tensor) -> Tensor | float:
            if self._job.num_servers == 1:
                return squares
            pair.send(float(squares))
            return float(pair.receive())

        clip(
            (found for each in gradients for found in each.found().values()),
            update.clip_value,
            update.clip_norm,
            reduce_sum,
        )

    def _take_values(self, request: Request) -> None:
        """Takes the values of worker 0's groups, which hold for all workers."""
        assert self._part is not None
        for group, values in zip(self._part.optimizer.param_groups, request.values, strict=True):
            group.update(values)

    @torch.no_grad()
    def _update(self, together: Iterable[_Gradients]) -> None:
        assert self._part is not None
        optimizer = self._part.optimizer
        found = {piece: gradient for gradients in together for piece, gradient in gradients.found().items()}
        held = [[piece for piece in group if piece in found] for group in self._held()]  # in their order
        if not any(held):
            return
        values = [dict(group) for group in optimizer.param_groups]
        try:
            self._part.update(held, found)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            raise UpdateError(f"the step of {type(optimizer).__name__} has failed on the server:\n{text}") from error
        self._check_values_stay(optimizer, values)

    def _check_values_stay(self, optimizer: Optimizer, values: Sequence[Mapping[str, Any]]) -> None:
        """Raises UpdateError if the step has changed values of its groups, which the next step gets from worker 0."""
        for before, now in zip(values, optimizer.param_groups, strict=True):
            changed = [name for name, value in now.items()
                       if value is not before.get(name) and repr(value) != repr(before.get(name))]  # fmt: skip
            if changed:
                raise UpdateError(
                    f"{type(optimizer).__name__} changes {', '.join(map(repr, changed))} of its groups in its "
                    "step, and servers take these values from rank 0 in each step: use strategy='cpu_ps'"
                )

    # Asynchronous workers

    def alone(self, worker: int, request: Request) -> tuple[int, int]:
        """Makes an update with the gradients of one worker, which may belong to weights that are not the newest.

        Returns:
            The version of the weights that the worker gets, and the staleness of its gradients.

        Raises:
            UpdateError: the step has failed.
        """
        if worker == 0:
            with self._changing:
                self._take_values(request)
        staleness, sent, buckets = 0, [], [self._buckets[number] for number in request.pushed]
        for together in self._portions(request):
            gradients = [self._gradients(bucket, {worker: request}) for bucket in together]
            self._clip(gradients, request.update, self._pairs[worker])
            with self._changing:  # after the updates of other workers
                stale = max((bucket.version - bucket.pulled[worker] for bucket in together), default=0)
                self._update(gradients)
                for bucket in together:
                    bucket.version += 1
                self._changing.wait_for(lambda: self._clocks.may_go_on(worker))
                sent += self._pull(worker, together)
            staleness = max(staleness, stale)
        with self._changing:
            self.staleness[worker][staleness] += 1
            self._clocks.completes(worker)
            self._changing.notify_all()
        self._await(worker, sent)
        return max((bucket.pulled[worker] for bucket in buckets), default=0), staleness

    def _pull(self, worker: int, buckets: Iterable[_Bucket]) -> list[Any]:
        """Sends a copy of the weights of now, since others update them while they are sent."""
        sent = []
        for bucket in buckets:
            room = bucket.rooms[worker]
            sent.append(room.pull(room.pulled.copy_(bucket.weights)))
            bucket.pulled[worker] = bucket.version
        return sent

    def pull(self, worker: int) -> int:
        """Sends all weights to a worker; returns their version."""
        with self._changing:
            known = [self._buckets[n] for plan in self.plans[: self._num_known[worker]] for n, _, _ in plan.buckets]
            sent = self._pull(worker, known)
        self._await(worker, sent)
        return max((bucket.pulled[worker] for bucket in known), default=0)

    def replace(self, weights: Mapping[int, Tensor]) -> None:
        """Takes weights that have changed on worker 0, by the numbers of their buckets."""
        for number, flat in weights.items():
            self._buckets[number].weights.copy_(flat)

    def pauses(self, worker: int) -> None:
        """Lets workers go on without waiting for this one until it pushes again; it may be validating."""
        self._clocks.leaves(worker)
        self._changing.notify_all()

    def loses(self, worker: int) -> None:
        """Forgets a worker that has left, and frees the memory that it shared."""
        self._kept.pop(worker, None)
        for bucket in self._buckets.values():
            bucket.rooms.pop(worker, None)
        self.pauses(worker)

    # Checkpoints

    def state(self) -> dict[tuple[int, int], dict[str, Any]]:
        """The optimizer's state of each piece, by bucket and place."""
        assert self._part is not None
        return {
            (bucket.number, index): state
            for bucket in self._buckets.values()
            for index, piece in enumerate(bucket.pieces)
            if (state := self._part.states.get(piece))
        }

    def load(self, values: Sequence[Mapping[str, Any]], states: Mapping[tuple[int, int], Mapping[str, Any]]) -> None:
        """Takes state as :meth:`state` returns it, and values of the groups."""
        assert self._part is not None
        found = {self._buckets[number].pieces[index]: state for (number, index), state in states.items()}
        self._part.load(values, found, self._held())
