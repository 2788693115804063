"""The shard of an optimizer that a parameter server holds, and the rounds in which it is updated."""

from __future__ import annotations

import math
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_multigpu.engine.parameter_server.clipping import ABSENT, DENSE, SPARSE, clip_norm, sum_of_squares
from lightning_multigpu.engine.parameter_server.member import Member
from lightning_multigpu.engine.parameter_server.wire import (
    WireError,
    bytes_of,
    dtype_of,
    optimizer_class,
    unpacked,
)


@dataclass(eq=False)
class _Bucket:
    """This server's part of a bucket: pieces of parameters of one dtype, one after the other."""

    number: int
    weights: Tensor
    pieces: list[Parameter]
    offsets: list[int]
    pushed: dict[int, tuple[list[int], Tensor | None]] = field(default_factory=dict)
    kinds: list[int] = field(default_factory=list)
    gradient: Tensor | None = None
    replacement: Tensor | None = None
    is_averaged: bool = False

    def part(self, flat: Tensor, index: int) -> Tensor:
        """The elements of a piece, in its shape."""
        piece = self.pieces[index]
        return flat[self.offsets[index] : self.offsets[index] + piece.numel()].view(piece.shape)

    def present(self) -> Iterator[Tensor]:
        """The averaged gradients of the pieces that have one."""
        if self.gradient is not None:
            for index, kind in enumerate(self.kinds):
                if kind != ABSENT:
                    yield self.part(self.gradient, index)


@dataclass(frozen=True)
class _Request:
    """What a worker asks to be done with the gradients of a round."""

    kind: str
    given_by_one: bool
    values: list[dict[str, Any]]
    clip_norm: float | None
    clip_value: float | None


class ServedOptimizer:
    """The shard of one optimizer: its pieces of parameters, and the rounds in which they are updated.

    A round begins with the pushes of the workers and ends when all of them have what they asked for: the averages of
    the gradients, or the weights after a step.

    Args:
        num_workers: that push in each round.
        num_servers: of the job; their squares make up the norm by which they clip.
        members: the workers that are there.
        number: of this optimizer, as the workers count.
    """

    def __init__(self, num_workers: int, num_servers: int, members: Mapping[int, Member], number: int) -> None:
        self._number = number
        self._num_workers = num_workers
        self._num_servers = num_servers
        self._members = members
        self._plans: list[Any] = []
        self._optimizer: Optimizer | None = None
        self._split = ""
        self._buckets: list[_Bucket] = []
        self._filled: list[_Bucket] = []
        self._averaged: list[_Bucket] = []
        self._num_sent = 0
        self._group_pieces: list[list[tuple[int, int]]] = []
        self._spare: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._sent: list[Tensor | None] = []
        self._round = 0
        self._requests: dict[int, _Request] = {}
        self._squares: float | None = None
        self._has_sent_squares = False

    # Parameters

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
        self._plans.append(plan)
        self._split = plan["split"]
        self._group_pieces = [[(int(b), int(i)) for b, i in group] for group in plan["groups"]]
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

    def _groups(self, values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        if len(values) != len(self._group_pieces):
            raise WireError(f"values of {len(values)} groups for {len(self._group_pieces)}")
        return [
            {**group, "params": [self._buckets[bucket].pieces[index] for bucket, index in pieces]}
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
        """Takes weights that a hook has changed on worker 0, for the next step: the old ones may still be sent."""
        self._bucket(number).replacement = weights

    # Rounds

    def room_for_push(self, number: Any, kinds: Any, payload_bytes: int) -> Tensor | None:
        """A tensor for the gradients of a bucket, which :meth:`push` gets; None if the worker has none.

        Raises:
            WireError: the push does not fit the bucket.
        """
        bucket = self._bucket(number)
        if not isinstance(kinds, list) or len(kinds) != len(bucket.pieces) or not set(kinds) <= {ABSENT, DENSE, SPARSE}:
            raise WireError(f"a push of bucket {number} does not say which of its {len(bucket.pieces)} pieces it has")
        if payload_bytes != (bucket.weights.nbytes if any(kinds) else 0):
            raise WireError(f"a push of {payload_bytes} bytes for a bucket of {bucket.weights.nbytes}")
        if not any(kinds):
            return None
        spare = self._spare[bucket.weights.numel(), bucket.weights.dtype]
        return spare.pop() if spare else torch.empty_like(bucket.weights)

    def push(self, worker: int, number: int, round_: int, kinds: list[int], gradients: Tensor | None) -> None:
        """The gradients of a worker for a bucket; those of an earlier push in the round are forgotten."""
        if round_ != self._round:
            raise WireError(f"worker {worker} pushes in round {round_}, and this is round {self._round}")
        bucket = self._bucket(number)
        _, before = bucket.pushed.get(worker, ([], None))
        self._spares([before])
        bucket.pushed[worker] = (kinds, gradients)
        self._go_on([bucket])

    def request(self, worker: int, round_: int, request: _Request) -> None:
        """What a worker wants of this round; the values of worker 0's groups hold for all."""
        if round_ != self._round or worker in self._requests:
            raise WireError(f"worker {worker} asks for round {round_}, and this is round {self._round}")
        others = [other for other in self._requests.values() if _without_values(other) != _without_values(request)]
        if others:
            raise WireError(
                f"workers ask for different steps: {_without_values(others[0])}, {_without_values(request)}"
            )
        self._requests[worker] = request
        if worker == 0 and request.kind == "step":
            assert self._optimizer is not None
            if len(request.values) != len(self._optimizer.param_groups):
                raise WireError("a step came with values of other groups")
            for group, values in zip(self._optimizer.param_groups, request.values, strict=True):
                group.update({name: value for name, value in values.items() if name != "params"})
        if len(self._requests) == self._num_workers:
            self._spares(self._sent)  # all workers have received them
            self._sent.clear()
            self._go_on(self._filled)

    def norm(self, squares: float) -> None:
        """The sum of squares of the gradients of all servers."""
        self._squares = squares
        self._go_on([])

    def _go_on(self, pushed: Sequence[_Bucket]) -> None:
        """Does what has become possible, ``pushed`` being the buckets that may have become complete."""
        if len(self._requests) < self._num_workers:
            return
        request = self._requests[0]
        pushing = {0} if request.given_by_one else set(range(self._num_workers))
        for bucket in pushed:
            if not bucket.is_averaged and bucket.pushed.keys() >= pushing:
                self._average(bucket, pushing)
                self._averaged.append(bucket)
        if request.kind == "average":
            self._send(self._averaged, lambda bucket: bucket.gradient)
            self._averaged = []
        else:
            self._step(request)
        if self._num_sent == len(self._filled):
            self._end_round(request)

    def _end_round(self, request: _Request) -> None:
        for bucket in self._filled:
            gradients = [flat for _, flat in bucket.pushed.values()]
            if request.kind == "average":
                self._sent += gradients  # one of them holds the average
            else:
                self._spares(gradients)
            bucket.pushed.clear()
            bucket.gradient, bucket.is_averaged = None, False
        self._requests.clear()
        self._squares, self._has_sent_squares, self._num_sent = None, False, 0
        self._round += 1

    def _average(self, bucket: _Bucket, pushing: set[int]) -> None:
        of_worker = [bucket.pushed[worker] for worker in sorted(pushing)]
        bucket.kinds = [max(kinds) for kinds in zip(*(kinds for kinds, _ in of_worker), strict=True)]
        present = [gradients for _, gradients in of_worker if gradients is not None]
        if present:
            total, *others = present
            for gradients in others:
                total += gradients
            if len(pushing) > 1:
                total /= len(pushing)
            bucket.gradient = total
        bucket.is_averaged = True

    def _step(self, request: _Request) -> None:
        at_once = self._split == "nothing" or request.clip_norm is not None
        buckets = self._averaged
        if at_once and len(buckets) < len(self._filled):
            return
        if request.clip_norm is not None and not self._clip_norm(buckets, request.clip_norm):
            return
        self._averaged = []
        for bucket in buckets:
            if bucket.replacement is not None:
                bucket.weights.copy_(bucket.replacement)
                bucket.replacement = None
            if request.clip_value is not None:
                for gradient in bucket.present():
                    gradient.clamp_(-request.clip_value, request.clip_value)
        for together in [buckets] if at_once else [[bucket] for bucket in buckets]:
            self._update(together)
            self._send(together, lambda bucket: bucket.weights)

    def _clip_norm(self, buckets: Sequence[_Bucket], max_norm: float) -> bool:
        """Clips by the norm over all servers; False while it is unknown."""
        gradients = [gradient for bucket in buckets for gradient in bucket.present()]
        if not self._has_sent_squares:
            squares = sum_of_squares(gradients)
            self._has_sent_squares = True
            if self._num_servers == 1:
                self._squares = squares
            else:
                self._members[0].post({"kind": "squares", "squares": squares})
        if self._squares is None:
            return False
        clip_norm(gradients, self._squares, max_norm)
        return True

    @torch.no_grad()
    def _update(self, buckets: Sequence[_Bucket]) -> None:
        optimizer = self._optimizer
        assert optimizer is not None
        chosen: set[Parameter] = set()
        for bucket in buckets:
            if bucket.gradient is None:
                continue
            for index, (piece, kind) in enumerate(zip(bucket.pieces, bucket.kinds, strict=True)):
                if kind != ABSENT:
                    gradient = bucket.part(bucket.gradient, index)
                    is_sparse = kind == SPARSE and self._split != "elements"
                    piece.grad = gradient.to_sparse(1) if is_sparse else gradient
                    chosen.add(piece)
        held = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [piece for piece in group["params"] if piece in chosen]
        try:
            if chosen:
                optimizer.step()
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            raise WireError(f"the step of {type(optimizer).__name__} has failed on the server:\n{text}") from error
        finally:
            for group, pieces in zip(optimizer.param_groups, held, strict=True):
                group["params"] = pieces
            for piece in chosen:
                piece.grad = None

    def _send(self, buckets: Sequence[_Bucket], what: Callable[[_Bucket], Tensor | None]) -> None:
        """Sends to all workers, once a round. Nothing changes it until all have received it and have pushed again."""
        for bucket in buckets:
            flat = what(bucket) if bucket.gradient is not None else None
            fields = {"kind": "part", "optimizer": self._number, "bucket": bucket.number, "kinds": bucket.kinds}
            for member in self._members.values():
                member.post(fields, [] if flat is None else [bytes_of(flat)])
        self._num_sent += len(buckets)

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
        """The optimizer's state of each piece: bucket, index in it, and values by name."""
        assert self._optimizer is not None
        return [
            [number, index, dict(state)]
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
            groups.append({**group, "params": [numbers[piece] for piece in pieces]})
        self._optimizer.load_state_dict(
            {"state": {numbers[bucket, index]: state for bucket, index, state in states}, "param_groups": groups}
        )


def request_of(fields: Mapping[str, Any]) -> _Request:
    clips = [None if fields.get(name) is None else float(fields[name]) for name in ("clip_norm", "clip_value")]
    values = unpacked(fields.get("values", []), [])
    return _Request(str(fields["kind"]), bool(fields.get("given_by_one")), list(values), *clips)


def _without_values(request: _Request) -> tuple[Any, ...]:
    return request.kind, request.given_by_one, request.clip_norm, request.clip_value
