"""The shard of an optimizer that a parameter server holds, and the rounds in which it is updated."""

from __future__ import annotations

import math
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_multigpu.communication.checksums import bytes_of
from lightning_multigpu.communication.compression.compressors import ElementwiseCompressor
from lightning_multigpu.communication.shared_memory.segment import OfferedSegment
from lightning_multigpu.engine.gradient_kinds import ABSENT, DENSE, SPARSE, common_kind, sparse
from lightning_multigpu.engine.parameter_server.bucket_memory import BucketMemory, cut, segment_for
from lightning_multigpu.engine.parameter_server.consistency import Clocks, Consistency
from lightning_multigpu.engine.parameter_server.member import Member
from lightning_multigpu.engine.parameter_server.wire import (
    WireError,
    dtype_of,
    elementwise,
    optimizer_class,
    unpacked,
)
from lightning_multigpu.placement.norms import scale_to_norm, sum_of_squares


@dataclass(eq=False)
class _Bucket:
    """This server's part of a bucket: pieces of parameters of one dtype, one after the other.

    ``version`` counts the rounds that it has been through; ``pulled`` has the version that an asynchronous worker
    holds, and the weights as they were sent.
    """

    number: int
    weights: Tensor
    pieces: list[Parameter]
    offsets: list[int]
    replacement: Tensor | None = None
    version: int = 0
    pulled: dict[int, tuple[int, Tensor]] = field(default_factory=dict)

    def part(self, flat: Tensor, index: int) -> Tensor:
        """The elements of a piece, in its shape."""
        piece = self.pieces[index]
        return flat[self.offsets[index] : self.offsets[index] + piece.numel()].view(piece.shape)


class _Push(NamedTuple):
    """What one worker has pushed of a bucket, in a room of the server or in memory of the worker's.

    ``rows`` has those of sparse gradients, by the index of their piece.
    """

    kinds: list[int]
    gradients: Tensor | None
    is_in_memory: bool
    rows: dict[int, Tensor]


@dataclass(eq=False)
class _Pushes:
    """What workers have pushed of a bucket in a round, and the average that it becomes."""

    bucket: _Bucket
    of_worker: dict[int, _Push] = field(default_factory=dict)
    kinds: list[int] = field(default_factory=list)
    rows: dict[int, Tensor] = field(default_factory=dict)
    gradient: Tensor | None = None
    rooms: list[Tensor] = field(default_factory=list)
    is_averaged: bool = False

    def present(self) -> Iterator[Tensor]:
        """The averaged gradients of the pieces that have one."""
        if self.gradient is not None:
            for index, kind in enumerate(self.kinds):
                if kind != ABSENT:
                    yield self.bucket.part(self.gradient, index)


@dataclass(eq=False)
class _Round:
    """From the pushes of its workers until all of them have what they asked for."""

    workers: Sequence[int]
    number: int = 0
    requests: dict[int, _Request] = field(default_factory=dict)
    pushes: dict[int, _Pushes] = field(default_factory=dict)
    averaged: list[_Pushes] = field(default_factory=list)
    num_sent: int = 0
    staleness: int = 0
    squares: float | None = None
    has_sent_squares: bool = False


@dataclass(frozen=True)
class Job:
    """What all workers and servers of a job know of it."""

    num_workers: int
    num_servers: int
    consistency: Consistency


@dataclass(frozen=True)
class _Request:
    """What a worker asks to be done with the gradients of a round."""

    kind: str
    given_by_one: bool
    values: list[dict[str, Any]]
    num_changed: int
    clip_norm: float | None
    clip_value: float | None


class ServedOptimizer:
    """The shard of one optimizer: its pieces of parameters, and the rounds in which they are updated.

    A round begins with the pushes of its workers and ends when all of them have what they asked for: the averages of
    the gradients, or the weights after a step. All workers go through the same rounds, or, where training is
    asynchronous, each worker goes through rounds of its own.

    Args:
        job: the numbers of workers and servers, and their consistency.
        members: the workers that are there.
        number: of this optimizer, as the workers count.

    Attributes:
        number: of this optimizer, as the workers count.
        staleness: how often the updates of each asynchronous worker had which staleness: the number of updates that
            others had made since the worker got the weights.
    """

    def __init__(self, job: Job, members: Mapping[int, Member], number: int) -> None:
        self.number = number
        self._num_servers = job.num_servers
        self._consistency = job.consistency
        self._members = members
        workers = range(job.num_workers)
        self._rounds: dict[int, _Round] = {}
        self._common = _Round(workers) if job.consistency.is_synchronous else None
        self._clocks = Clocks(workers, job.consistency.max_staleness)
        self.staleness: dict[int, Counter[int]] = defaultdict(Counter)
        self._held: dict[int, list[tuple[_Bucket, int]]] = defaultdict(list)
        self._plans: list[Any] = []
        self._optimizer: Optimizer | None = None
        self._split = ""
        self._compressor: ElementwiseCompressor | None = None
        self._buckets: list[_Bucket] = []
        self._filled: list[_Bucket] = []
        self._num_known: dict[int, int] = {}
        self._ends: list[int] = []
        self._plan_buckets: list[list[_Bucket]] = []
        self._offered: dict[tuple[int, int], list[OfferedSegment]] = {}
        self._shared_weights: dict[int, OfferedSegment] = {}
        self._group_pieces: list[list[tuple[int, int]]] = []
        self._places: dict[tuple[int, int], tuple[int, int]] = {}
        self._spare: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._sent: list[Tensor | None] = []

    # Parameters

    def lacks(self, number: int) -> bool:
        """Whether worker 0 has yet to tell of these parameters, and of none before them."""
        return number == len(self._plans)

    def configure(self, worker: int, number: int, plan: Mapping[str, Any], body: Mapping[str, Any] | None) -> None:
        """Takes the plan of parameters that are new; from worker 0 with their weights, from others to compare.

        Raises:
            WireError: it is not worker 0's plan, or the optimizer cannot be made here.
        """
        if worker != 0:
            if number >= len(self._plans) or self._plans[number] != plan:
                raise WireError(
                    f"worker {worker} has other parameters, or another optimizer, than worker 0: build the model alike "
                    "on all workers"
                )
            self._num_known[worker] = self._ends[number]
            return
        if body is None or number != len(self._plans):
            raise WireError("a plan came out of turn, or without weights")
        weights, buckets = body["weights"], plan["buckets"]
        if len(weights) != len(buckets):
            raise WireError("a plan and its weights differ in length")
        new: list[_Bucket] = []
        for flat, described in zip(weights, buckets, strict=True):
            if flat.dtype != dtype_of(described["dtype"]):
                raise WireError(f"weights of {flat.dtype} for a bucket of {described['dtype']}")
            bucket, offset = _Bucket(len(self._buckets) + len(new), flat, [], []), 0
            for shape in described["pieces"]:
                numel = math.prod(shape)
                piece = Parameter(flat[offset : offset + numel].view(shape), requires_grad=False)
                bucket.pieces.append(piece)
                bucket.offsets.append(offset)
                offset += numel
            if offset != flat.numel():
                raise WireError(f"a bucket of {flat.numel()} elements has pieces of {offset}")
            new.append(bucket)
        first = len(self._buckets)
        self._buckets += new
        self._filled = [bucket for bucket in self._buckets if bucket.pieces]
        self._num_known[0] = len(self._filled)
        self._ends.append(len(self._filled))
        self._plan_buckets.append([bucket for bucket in new if bucket.weights.nbytes])
        self._plans.append(plan)
        self._split = plan["split"]
        self._compressor = elementwise(plan.get("compression"))
        self._group_pieces = [[(int(b), int(i)) for b, i in group] for group in plan["groups"]]
        self._places = {
            piece: (group, place)
            for group, pieces in enumerate(self._group_pieces)
            for place, piece in enumerate(pieces)
        }
        if self._optimizer is None:
            kind = optimizer_class(plan["class"])
            self._optimizer = kind.__new__(kind)
            # As if it were unpickled, which any optimizer knows how to be; its constructor may want what it likes.
            self._optimizer.__setstate__({
                "defaults": body["defaults"], "state": defaultdict(dict), "param_groups": self._groups(body["values"]),
            })  # fmt: skip
        else:
            self._optimizer.param_groups = self._groups(body["values"])
        for bucket, index, state in body["state"]:
            self._optimizer.state[self._buckets[first + bucket].pieces[index]] = state

    # Memory that workers of this host share

    def offer_memory(self, worker: int, number: int) -> dict[str, Any]:
        """Makes memory for the buckets of a plan; returns what the worker needs to map it, or why there is none."""
        buckets = self._plan_buckets[number]
        sizes = [bucket.weights.nbytes for bucket in buckets]
        try:
            segments = [segment_for(sizes), segment_for(sizes) if self._common is None else self._weights_of(number)]
        except OSError as error:
            return {"problem": str(error)}
        self._offered[worker, number] = segments
        return {
            "optimizer": self.number,
            "number": number,
            "segments": [segment.offer for segment in segments],
            "buckets": [[bucket.number, size] for bucket, size in zip(buckets, sizes, strict=True)],
        }

    def _weights_of(self, number: int) -> OfferedSegment:
        """Memory to which the weights of a plan move, for all synchronous workers of this host."""
        if number not in self._shared_weights:
            buckets = self._plan_buckets[number]
            sizes = [bucket.weights.nbytes for bucket in buckets]
            segment = self._shared_weights[number] = segment_for(sizes)
            for bucket, memory in zip(buckets, cut(segment.memory, sizes), strict=True):
                bucket.weights = memory.view(bucket.weights.dtype).copy_(bucket.weights)
                for index, piece in enumerate(bucket.pieces):
                    piece.data = bucket.part(bucket.weights, index)
        return self._shared_weights[number]

    def memory_is_mapped(self, worker: int, number: int, *, is_mapped: bool) -> None:
        """Uses the memory that was offered to a worker, which has mapped it, or frees it."""
        segments = self._offered.pop((worker, number))
        if not is_mapped:
            return
        buckets = self._plan_buckets[number]
        sizes = [bucket.weights.nbytes for bucket in buckets]
        memories = (cut(segment.memory, sizes) for segment in segments)
        for bucket, pushed, weights in zip(buckets, *memories, strict=True):
            self._members[worker].memory[self.number, bucket.number] = BucketMemory(pushed, weights)
            if self._common is None:
                bucket.pulled[worker] = 0, weights.view(bucket.weights.dtype)

    def end_offers(self) -> None:
        """Ends the offers of memory; mapped memory stays mapped."""
        self._offered.clear()
        self._shared_weights.clear()

    def _groups(self, values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        if len(values) != len(self._group_pieces):
            raise WireError(f"values of {len(values)} groups for {len(self._group_pieces)}")
        return [
            {**_on_cpu(group), "params": [self._buckets[bucket].pieces[index] for bucket, index in pieces]}
            for group, pieces in zip(values, self._group_pieces, strict=True)
        ]

    def room_for_weights(self, number: Any, payload_bytes: int) -> Tensor:
        """A tensor for weights of a bucket, which :meth:`replace_weights` gets.

        Raises:
            WireError: they do not fit the bucket.
        """
        weights = self._bucket(number).weights
        if payload_bytes != weights.nbytes:
            raise WireError(f"{payload_bytes} bytes of new weights for a bucket of {weights.nbytes}")
        return torch.empty_like(weights)

    def replace_weights(self, number: int, weights: Tensor) -> None:
        """Takes weights that have changed on worker 0, for the next step: the old ones may still be sent."""
        bucket = self._bucket(number)
        bucket.replacement = weights
        if self._common is None:  # what is sent is a copy
            self._replace(bucket)

    def _replace(self, bucket: _Bucket) -> None:
        if bucket.replacement is not None:
            bucket.weights.copy_(bucket.replacement)
            bucket.replacement = None

    # Rounds

    def room_for_push(
        self,
        number: Any,
        kinds: Any,
        payload_bytes: int,
        *,
        is_compressed: bool = False,
        memory: BucketMemory | None = None,
    ) -> Tensor | None:
        """A tensor for the gradients of a bucket, which :meth:`push` gets; None if the worker has none.

        It is of the weights' dtype, or uint8 for compressed gradients. With ``memory`` it has them already.

        Raises:
            WireError: the push does not fit the bucket.
        """
        bucket = self._bucket(number)
        if not isinstance(kinds, list) or len(kinds) != len(bucket.pieces) or not set(kinds) <= {ABSENT, DENSE, SPARSE}:
            raise WireError(f"a push of bucket {number} does not say which of its {len(bucket.pieces)} pieces it has")
        weights = bucket.weights
        numel, dtype = weights.numel(), weights.dtype
        if is_compressed:
            if self._compressor is None or dtype != torch.float32:
                raise WireError("a push is compressed, and was not announced as such")
            numel, dtype = self._compressor.encoded_bytes(numel), torch.uint8
        size_bytes = numel * dtype.itemsize if any(kinds) else 0
        if payload_bytes != (0 if memory is not None else size_bytes):
            raise WireError(f"a push of {payload_bytes} bytes for a bucket of {weights.nbytes}")
        if memory is not None and size_bytes > memory.pushed.numel():
            raise WireError(f"a push of {size_bytes} bytes in memory of {memory.pushed.numel()}")
        if not any(kinds):
            return None
        return self._room(numel, dtype) if memory is None else memory.pushed[:size_bytes].view(dtype)

    def rows(self, number: Any, told: Any) -> dict[int, Tensor]:
        """The rows of sparse gradients in a push: bool, by the index of their piece.

        Raises:
            WireError: there are no such rows.
        """
        pieces, found = self._bucket(number).pieces, {}
        for index, rows in told:
            shape = pieces[index].shape
            if not shape or not all(type(row) is int and 0 <= row < shape[0] for row in rows):
                raise WireError(f"a push of bucket {number} has rows of a sparse gradient that piece {index} has not")
            found[index] = torch.zeros(shape[0], dtype=torch.bool)
            found[index][rows] = True
        return found

    def _room(self, numel: int, dtype: torch.dtype) -> Tensor:
        spare = self._spare[numel, dtype]
        return spare.pop() if spare else torch.empty(numel, dtype=dtype)

    def _round_of(self, worker: int) -> _Round:
        if self._common is not None:
            return self._common
        if worker not in self._rounds:
            self._rounds[worker] = _Round((worker,))
        return self._rounds[worker]

    def push(
        self,
        worker: int,
        number: int,
        round_: int,
        kinds: list[int],
        gradients: Tensor | None,
        *,
        rows: dict[int, Tensor] | None = None,
        is_in_memory: bool = False,
    ) -> None:
        """The gradients of a worker for a bucket; those of an earlier push in the round are forgotten."""
        round_now = self._round_of(worker)
        if round_ != round_now.number:
            raise WireError(f"worker {worker} pushes in round {round_}, and this is round {round_now.number}")
        pushes = round_now.pushes.setdefault(number, _Pushes(self._bucket(number)))
        before = pushes.of_worker.get(worker)
        if before is not None and not before.is_in_memory:
            self._spares([before.gradients])
        if gradients is not None and gradients.dtype != pushes.bucket.weights.dtype:
            assert self._compressor is not None
            wire, gradients = gradients, self._room(pushes.bucket.weights.numel(), torch.float32)
            self._compressor.decode(wire, gradients)
            self._spares([] if is_in_memory else [wire])
            is_in_memory = False
        pushes.of_worker[worker] = _Push(kinds, gradients, is_in_memory, rows or {})
        self._go_on(round_now, [pushes])

    def request(self, worker: int, round_: int, request: _Request) -> None:
        """Takes a worker's request for this round; the values of worker 0's groups hold for all workers."""
        round_now = self._round_of(worker)
        if round_ != round_now.number or worker in round_now.requests:
            raise WireError(f"worker {worker} asks for round {round_}, and this is round {round_now.number}")
        others = [o for o in round_now.requests.values() if _without_values(o) != _without_values(request)]
        if others:
            raise WireError(
                f"workers ask for different steps: {_without_values(others[0])}, {_without_values(request)}; register "
                "hooks that read gradients before a step, and change optimizer.state, on all workers"
            )
        round_now.requests[worker] = request
        if worker == 0 and request.kind == "step":
            assert self._optimizer is not None
            if len(request.values) != len(self._optimizer.param_groups):
                raise WireError("a step came with values of other groups")
            for group, values in zip(self._optimizer.param_groups, request.values, strict=True):
                group.update({name: value for name, value in _on_cpu(values).items() if name != "params"})
        if len(round_now.requests) == len(round_now.workers):
            self._spares(self._sent)  # all workers have received them
            self._sent.clear()
            self._go_on(round_now, list(round_now.pushes.values()))

    def norm(self, worker: int, squares: float) -> None:
        """The sum of squares of the gradients of all servers."""
        round_now = self._round_of(worker)
        round_now.squares = squares
        self._go_on(round_now, [])

    def _go_on(self, round_now: _Round, pushed: Sequence[_Pushes]) -> None:
        """Averages and updates the buckets that have become complete, ``pushed`` being the candidates."""
        if len(round_now.requests) < len(round_now.workers):
            return
        request = round_now.requests[round_now.workers[0]]
        pushing = {round_now.workers[0]} if request.given_by_one else set(round_now.workers)
        for pushes in pushed:
            if not pushes.is_averaged and pushes.of_worker.keys() >= pushing:
                self._average(pushes, pushing)
                round_now.averaged.append(pushes)
        if request.kind == "average":
            self._send(round_now, round_now.averaged)
            round_now.averaged = []
        else:
            self._step(round_now, request)
        if round_now.num_sent == self._num_known[round_now.workers[0]]:
            self._end_round(round_now, request)

    def _end_round(self, round_now: _Round, request: _Request) -> None:
        for pushes in round_now.pushes.values():
            rooms = [push.gradients for push in pushes.of_worker.values() if not push.is_in_memory] + pushes.rooms
            if request.kind == "average":
                self._sent += rooms  # one of them holds the average
            else:
                self._spares(rooms)
        following = _Round(round_now.workers, round_now.number + 1)
        if self._common is not None:
            self._common = following
            return
        (worker,) = round_now.workers
        self._rounds[worker] = following
        self.staleness[worker][round_now.staleness] += 1
        self._clocks.completes(worker)
        self._release()

    def _average(self, pushes: _Pushes, pushing: set[int]) -> None:
        of_worker = [pushes.of_worker[worker] for worker in sorted(pushing)]
        pushes.kinds = [common_kind(kinds) for kinds in zip(*(push.kinds for push in of_worker), strict=True)]
        for push in of_worker:
            for index, rows in push.rows.items():
                pushes.rows[index] = rows | pushes.rows.get(index, rows)
        present = [push.gradients for push in of_worker if push.gradients is not None]
        if present:
            total, *others = present
            if len(pushing) > 1 and any(push.gradients is total and push.is_in_memory for push in of_worker):
                # That worker may push again before the others have got the average.
                room = self._room(total.numel(), total.dtype)
                total = torch.add(total, others.pop(0), out=room) if others else room.copy_(total)
                pushes.rooms.append(room)
            for gradients in others:
                total += gradients
            if len(pushing) > 1:
                total /= len(pushing)
            pushes.gradient = total
        pushes.is_averaged = True

    def _step(self, round_now: _Round, request: _Request) -> None:
        at_once = self._split == "nothing" or request.clip_norm is not None
        complete = round_now.averaged
        if at_once and len(complete) < self._num_known[round_now.workers[0]]:
            return
        if request.clip_norm is not None and not self._clip_norm(round_now, complete, request.clip_norm):
            return
        round_now.averaged = []
        for pushes in complete:
            self._replace(pushes.bucket)
            if request.clip_value is not None:
                for gradient in pushes.present():
                    gradient.clamp_(-request.clip_value, request.clip_value)
        for together in [complete] if at_once else [[pushes] for pushes in complete]:
            if self._common is not None:
                self._update(together)
                self._send(round_now, together)
            elif together:
                self._update_alone(round_now, together)

    def _clip_norm(self, round_now: _Round, complete: Sequence[_Pushes], max_norm: float) -> bool:
        """Clips by the norm over all servers; False while it is unknown."""
        gradients = [gradient for pushes in complete for gradient in pushes.present()]
        if not round_now.has_sent_squares:
            squares = float(sum_of_squares(gradients))
            round_now.has_sent_squares = True
            if self._num_servers == 1:
                round_now.squares = squares
            else:
                told = {"kind": "squares", "optimizer": self.number, "squares": squares}
                self._members[round_now.workers[0]].post(told)
        if round_now.squares is None:
            return False
        scale_to_norm(gradients, max_norm, round_now.squares)
        return True

    # Asynchronous workers

    def _update_alone(self, round_now: _Round, together: Sequence[_Pushes]) -> None:
        """Updates with the gradients of one worker, which may belong to weights that are no longer the newest."""
        (worker,), rules = round_now.workers, self._consistency
        staleness = 0
        for pushes in together:
            bucket = pushes.bucket
            version, pulled = bucket.pulled[worker]
            staleness = max(staleness, bucket.version - version)
            if rules.compensation and pushes.gradient is not None:
                gradient = pushes.gradient
                gradient.addcmul_(gradient.square(), bucket.weights - pulled, value=rules.compensation)
            bucket.version += 1
        round_now.staleness = max(round_now.staleness, staleness)
        self._update(together, divide_rate_by=max(1, staleness) if rules.scales_learning_rate else 1)
        round_now.num_sent += len(together)
        for pushes in together:
            if self._clocks.may_go_on(worker, completing=True):
                self._send_weights(worker, pushes.bucket, staleness)
            else:
                self._held[worker].append((pushes.bucket, staleness))

    def _release(self) -> None:
        """Sends what was held back from workers that were too far ahead of the slowest."""
        for worker in [w for w in self._held if self._clocks.may_go_on(w, completing=False)]:
            for bucket, staleness in self._held.pop(worker):
                self._send_weights(worker, bucket, staleness)

    def _send_weights(self, worker: int, bucket: _Bucket, staleness: int) -> None:
        """Sends a copy of the weights of now, since others update them while they are sent.

        The copy replaces the one before, which the worker has received: it asks for no more until then.
        """
        member = self._members.get(worker)
        if member is None:
            return
        if worker not in bucket.pulled:
            bucket.pulled[worker] = 0, torch.empty_like(bucket.weights)
        weights = bucket.pulled[worker][1].copy_(bucket.weights)
        bucket.pulled[worker] = bucket.version, weights
        fields = {
            "kind": "part",
            "optimizer": self.number,
            "bucket": bucket.number,
            "kinds": [DENSE] * len(bucket.pieces),
            "version": bucket.version,
            "staleness": staleness,
        }
        if (self.number, bucket.number) in member.memory:
            self._post_in_memory(member, {**fields, "in_memory": "weights"}, weights)
        else:
            member.post(fields, [bytes_of(weights)])

    def pull(self, worker: int) -> None:
        """Sends all weights to a worker."""
        for bucket in self._filled[: self._num_known[worker]]:
            self._send_weights(worker, bucket, 0)

    def pauses(self, worker: int) -> None:
        """Lets workers go on without waiting for this one until it pushes again; it may be validating."""
        self._clocks.leaves(worker)
        self._release()

    def loses(self, worker: int) -> None:
        """Forgets a lost worker, and its pushes for a step that it did not complete."""
        self._rounds.pop(worker, None)
        self._held.pop(worker, None)
        self._num_known.pop(worker, None)
        self._offered = {of: segments for of, segments in self._offered.items() if of[0] != worker}
        for bucket in self._buckets:
            bucket.pulled.pop(worker, None)
        self.pauses(worker)

    @torch.no_grad()
    def _update(self, together: Sequence[_Pushes], *, divide_rate_by: int = 1) -> None:
        optimizer = self._optimizer
        assert optimizer is not None
        chosen: list[tuple[tuple[int, int], Parameter]] = []
        for pushes in together:
            if pushes.gradient is None:
                continue
            for index, (piece, kind) in enumerate(zip(pushes.bucket.pieces, pushes.kinds, strict=True)):
                place = self._places.get((pushes.bucket.number, index))
                if kind != ABSENT and place is not None:
                    gradient = pushes.bucket.part(pushes.gradient, index)
                    is_sparse = kind == SPARSE and self._split != "elements"
                    piece.grad = sparse(gradient, pushes.rows.get(index)) if is_sparse else gradient
                    chosen.append((place, piece))
        held = [(group["params"], group.get("lr")) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = []
            if divide_rate_by > 1 and "lr" in group:
                group["lr"] = group["lr"] / divide_rate_by
        for (number, _), piece in sorted(chosen, key=lambda found: found[0]):  # in their order, as on one device
            optimizer.param_groups[number]["params"].append(piece)
        values = [dict(group) for group in optimizer.param_groups]
        try:
            if chosen:
                optimizer.step()
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            raise WireError(f"the step of {type(optimizer).__name__} has failed on the server:\n{text}") from error
        else:
            self._check_values_stay(values)
        finally:
            for group, (pieces, rate) in zip(optimizer.param_groups, held, strict=True):
                group["params"] = pieces
                if divide_rate_by > 1 and rate is not None:
                    group["lr"] = rate
            for _, piece in chosen:
                piece.grad = None

    def _check_values_stay(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Raises WireError if the step has changed values of its groups, which the next step gets from worker 0."""
        assert self._optimizer is not None
        for before, now in zip(values, self._optimizer.param_groups, strict=True):
            changed = [name for name, value in now.items()
                       if value is not before.get(name) and repr(value) != repr(before.get(name))]  # fmt: skip
            if changed:
                raise WireError(
                    f"{type(self._optimizer).__name__} changes {', '.join(map(repr, changed))} of its groups in its "
                    "step, and servers take these values from rank 0 in each step: use strategy='cpu_ps'"
                )

    def _send(self, round_now: _Round, complete: Sequence[_Pushes]) -> None:
        """Sends to all workers, once a round. Nothing changes it until all have received it and have pushed again."""
        for pushes in complete:
            for member in self._members.values():
                self._send_part(member, round_now, pushes)
        round_now.num_sent += len(complete)

    def _send_part(self, member: Member, round_: _Round, pushes: _Pushes) -> None:
        """Sends a bucket's averages, or its weights after the step."""
        averages = round_.requests[round_.workers[0]].kind == "average"
        flat = None if pushes.gradient is None else pushes.gradient if averages else pushes.bucket.weights
        fields = {"kind": "part", "optimizer": self.number, "bucket": pushes.bucket.number, "kinds": pushes.kinds}
        if averages:
            fields["rows"] = [[index, rows.nonzero().flatten().tolist()] for index, rows in pushes.rows.items()]
        memory = member.memory.get((self.number, pushes.bucket.number))
        if flat is None or memory is None:
            member.post(fields, [] if flat is None else [bytes_of(flat)])
            return
        if averages:
            memory.pushed.view(flat.dtype).copy_(flat)
        self._post_in_memory(member, {**fields, "in_memory": "pushed" if averages else "weights"}, flat)

    def _post_in_memory(self, member: Member, fields: dict[str, Any], flat: Tensor) -> None:
        member.memory_out += flat.nbytes
        member.post(fields)

    def _bucket(self, number: Any) -> _Bucket:
        if type(number) is not int or not 0 <= number < len(self._buckets):
            raise WireError(f"there is no bucket {str(number)[:40]}")
        return self._buckets[number]

    def _spares(self, gradients: Any) -> None:
        for flat in gradients:
            if flat is not None:
                self._spare[flat.numel(), flat.dtype].append(flat)

    # Checkpoints

    def state(self) -> list[list[Any]]:
        """The optimizer's state of each piece, copied: bucket, index in it, and values by name."""
        assert self._optimizer is not None
        return [
            [number, index, {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}]
            for number, bucket in enumerate(self._buckets)
            for index, piece in enumerate(bucket.pieces)
            if (state := self._optimizer.state.get(piece))
        ]

    def load(self, values: Sequence[Mapping[str, Any]], states: Sequence[Sequence[Any]]) -> None:
        """Takes state as :meth:`state` returns it, and values of the groups."""
        assert self._optimizer is not None
        numbers: dict[tuple[int, int], int] = {}
        groups = []
        for group, pieces in zip(values, self._group_pieces, strict=True):
            for piece in pieces:
                numbers[piece] = len(numbers)
            groups.append({**_on_cpu(group), "params": [numbers[piece] for piece in pieces]})
        self._optimizer.load_state_dict(
            {"state": {numbers[bucket, index]: state for bucket, index, state in states}, "param_groups": groups}
        )


def request_of(fields: Mapping[str, Any], tensors: Sequence[Tensor]) -> _Request:
    clips = [None if fields.get(name) is None else float(fields[name]) for name in ("clip_norm", "clip_value")]
    values = unpacked(fields.get("values", []), tensors)
    changed = int(fields.get("num_changed", 0))
    return _Request(str(fields["kind"]), bool(fields.get("given_by_one")), list(values), changed, *clips)


def _on_cpu(group: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a group for an update on the CPU, where torch captures no graphs."""
    return {name: False if name == "capturable" else value for name, value in group.items()}


def _without_values(request: _Request) -> tuple[Any, ...]:
    return request.kind, request.given_by_one, request.clip_norm, request.clip_value, request.num_changed
