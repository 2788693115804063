"""A worker's side of parameter servers: an optimizer that pushes gradients, and pulls the weights that servers make.

The user's optimizer object stays what schedulers and callbacks know. Its groups hold the module's parameters; their
values travel with every step, and its state lives on the servers::

    worker     backward [b2]  [b1]  [b0]   step()                               forward
                          \\     \\     \\      \\                            /
    push                  [b2] [b1]  [b0] <- the step itself is sent first
                                             \\                           /
    server                                    [average, step: b2] [b1] [b0]
                                                       \\      \\    \\
    pull                                                [b2]  [b1]  [b0]

Source: M. Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_multigpu.communication.checksums import checksums
from lightning_multigpu.communication.compression.compressors import ElementwiseCompressor
from lightning_multigpu.communication.shared_memory.segment import mapped
from lightning_multigpu.communication.tensors import alike
from lightning_multigpu.engine.parameter_server.rooms import Room, cut, room_bytes, wire_bytes
from lightning_multigpu.engine.parameter_server.served_shard import Contents, Plan, Request
from lightning_multigpu.engine.parameter_server.servers import Answer, Servers
from lightning_multigpu.engine.redirected_optimizer import (
    RedirectedOptimizer,
    call_on_gradient,
    part_of,
)
from lightning_multigpu.placement.gradient_kinds import ABSENT, SPARSE, kind_of, rows_of, sparse
from lightning_multigpu.placement.optimizer_split import Split
from lightning_multigpu.placement.table import bucket_parts, imbalance_of


class _Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of a parameter, at ``offset`` of a server's part."""

    parameter: Parameter
    start: int
    stop: int
    offset: int

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.parameter.numel()

    def of(self, tensor: Tensor) -> Tensor:
        """The elements of a tensor that has the parameter's shape; of one that is not contiguous, a copy of them."""
        return tensor.detach().reshape(-1)[self.start : self.stop]

    def fill(self, tensor: Tensor, elements: Tensor) -> None:
        """Changes the elements of a tensor that has the parameter's shape."""
        whole = tensor.detach().contiguous()  # itself, but for layouts such as channels_last
        self.of(whole).copy_(elements)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(whole)

    def part_of(self, value: Any) -> Any:
        """The part of a value of the parameter's state that belongs to the piece."""
        return part_of(value, self.parameter, self.start, self.stop)

    def place(self, flat: Tensor) -> Tensor:
        """The elements of a server's part."""
        return flat[self.offset : self.offset + self.stop - self.start]


_States = dict[tuple[int, int], dict[str, Any]]


@dataclass(eq=False)
class _Part:
    """One server's part of a bucket, with the memory between the server and this worker."""

    server: int
    pieces: list[_Piece]
    dtype: torch.dtype
    errors: dict[int, Tensor] = field(default_factory=dict)

    def encode(self, gradients: Tensor, compressor: ElementwiseCompressor, round_: int, wire: Tensor) -> None:
        """Encodes gradients, changed in place; the error is added to those of the next round.

        A second push of a round takes the place of the first, and begins with the same errors.
        """
        earlier = max((of_round for of_round in self.errors if of_round < round_), default=None)
        if earlier is not None:
            before = self.errors[earlier]
            self.errors.clear()
            self.errors[earlier] = before
            gradients += before
        compressor.encode(gradients, wire)
        if compressor.has_error_feedback:
            self.errors[round_] = gradients

    @property
    def numel(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def joined_weights(self) -> Tensor:
        """The weights of the pieces, flat, on the host."""
        return torch.cat([piece.of(piece.parameter).cpu() for piece in self.pieces])


@dataclass(eq=False)
class _Bucket:
    """Parameters of one dtype and device whose gradients travel together; only the parts that have pieces."""

    number: int
    parameters: list[Parameter]
    parts: list[_Part]
    rooms: dict[int, Room] = field(default_factory=dict)
    ready: set[Parameter] = field(default_factory=set)
    pushed: list[tuple[Tensor | None, int]] | None = None
    num_pushes: int = 0

    @property
    def is_active(self) -> bool:
        """Whether it is pushed and pulled: buckets of frozen parameters are not."""
        return any(p.requires_grad or p.grad is not None for p in self.parameters)

    def gradients(self) -> list[tuple[Tensor | None, int]]:
        """The gradients of now, and how often each was changed."""
        gradients = [parameter.grad for parameter in self.parameters]
        return [(gradient, -1 if gradient is None else gradient._version) for gradient in gradients]

    def is_stale(self) -> bool:
        """True if the gradients are no longer what was pushed."""
        now, pushed = self.gradients(), self.pushed or []
        return any(a is not b or x != y for (a, x), (b, y) in zip(now, pushed, strict=True))


class RemoteOptimizer(RedirectedOptimizer):
    """One optimizer of the user's, whose updates are made by servers.

    Making one, stepping, saving and loading are collectives of the workers.

    Args:
        optimizer: of a module that is the same on all workers.
        servers: the servers.
        split: what the servers may divide; by default, what the class of the optimizer allows.
        bucket_bytes: of gradients that travel together.
        compressor: of the float32 gradients that are pushed; None to push them as they are.

    Attributes:
        version: of the weights that this asynchronous worker has: the updates that all workers have made.

    Raises:
        ValueError: the optimizer cannot run on a server.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        servers: Servers,
        *,
        split: Split | None = None,
        bucket_bytes: int = 4 * 2**20,
        compressor: ElementwiseCompressor | None = None,
    ) -> None:
        _check_importable(optimizer)
        super().__init__(optimizer, split)
        self.version = 0
        self._servers = servers
        self._bucket_bytes = bucket_bytes
        self._compressor = compressor
        self._buckets: list[_Bucket] = []
        self._pieces: dict[Parameter, list[tuple[_Bucket, _Part, int]]] = {}
        self._groups: list[list[int]] | None = None
        self._num_changed = 0
        self._round = 0
        self._pushing: list[tuple[int, Future[None]]] = []
        self._sums: dict[_Part, list[int]] = {}
        self._hooks: list[Any] = []
        self._copying: torch.cuda.Stream | None = None
        self._number = servers.new_number()

    @property
    def imbalance(self) -> float:
        """The largest shard in proportion to an even one; 1.0 is even."""
        self._place_new()
        sizes = [0] * self._servers.job.num_servers
        for _, part in self._parts():
            sizes[part.server] += part.nbytes
        return imbalance_of(sizes)

    def close(self) -> None:
        """Gives the optimizer its own ``step`` back, and pushes nothing from now on."""
        super().close()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._buckets, self._pieces = [], [], {}

    def _parts(self) -> Iterator[tuple[_Bucket, _Part]]:
        return ((bucket, part) for bucket in self._buckets for part in bucket.parts)

    @property
    def _asked(self) -> list[int]:
        """The servers that have a part."""
        return sorted({part.server for _, part in self._parts()})

    def average_gradients(self) -> None:
        if not self._servers.is_synchronous:  # a worker's gradients are its own
            return
        self._place_new()
        self.gradients_are_whole = False  # backward has added to what was averaged before
        self._ask([bucket for bucket in self._buckets if bucket.is_active], is_step=False)
        self.gradients_are_whole = True

    def _step(self) -> None:
        """Push gradients, have the servers step, pull all weights."""
        changed = self._changed()
        if changed and not self._servers.is_synchronous:
            raise ValueError(
                "a hook has changed weights in place, and other workers have made updates to them meanwhile, which "
                "would be lost: use strategy='sync_ps' with that hook"
            )
        active = [bucket for bucket in self._buckets if bucket.is_active]
        answers = self._ask(active, is_step=True, changed=changed)
        self._sums.update(_sums_of(part for _, part in changed))
        if not self._servers.is_synchronous:
            self.version = max([self.version, *[version for version, _ in answers]])
        self._num_changed = 0
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # as its own step would tell LR schedulers

    @torch.no_grad()
    def pull(self) -> None:
        """Gets the newest weights."""
        answers = {server: self._servers.ask(server, "pull", self._number) for server in self._asked}
        self._take_weights(self._buckets, answers)
        self.version = max([self.version, *[answer.get() for answer in answers.values()]])

    def send_changed_weights(self) -> bool:
        """On worker 0 of asynchronous workers: sends the weights that have changed since they came.

        Returns:
            Whether there were any: a hook or a checkpoint has changed them.
        """
        changed = self._changed()
        for server in {part.server for _, part in changed}:
            self._servers.tell(server, "replace", self._number, _weights_for(server, changed))
        self._sums.update(_sums_of(part for _, part in changed))
        return bool(changed)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The state as the whole optimizer would have it on one device; a collective.

        Returns:
            On worker 0 the values of all tensors, in host memory; on others the groups alone.
        """
        self._place_new()
        self._take_state()
        found = self.groups_alone()
        if self._servers.worker == 0:
            found["state"] = self._states()
        return found

    def _states(self) -> dict[int, dict[str, Any]]:
        """On worker 0 the states of the servers, by the number of a parameter."""
        asked = {server: self._servers.ask(server, "state", self._number) for server in self._asked}
        told = {server: answer.get() for server, answer in asked.items()}
        found: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(self._parameters()):
            pieces = self._pieces.get(parameter, [])
            states = [told[part.server].get((bucket.number, index)) for bucket, part, index in pieces]
            if present := [state for state in states if state is not None]:
                found[number] = {name: _joined([state[name] for state in present], parameter) for name in present[0]}
        return found

    def _load(self, saved_groups: list[dict[str, Any]], saved_state: Mapping[int, Any]) -> None:
        self.optimizer.load_state_dict({"state": {}, "param_groups": saved_groups})
        numbers = [number for group in saved_groups for number in group["params"]]
        parameter_of = dict(zip(numbers, self._parameters(), strict=True))
        self._send_states({parameter_of[number]: state for number, state in saved_state.items()})

    def _change_state(self, changes: Mapping[Parameter, Mapping[str, Any]]) -> None:
        self._num_changed += len(changes)
        if not changes or self._servers.worker != 0:
            return
        parameters, before = self._parameters(), {}
        if len(changes) < len(parameters):
            if not self._servers.is_synchronous:
                raise ValueError(
                    f"the states of {len(changes)} of {len(parameters)} parameters were changed in optimizer.state, "
                    "and other workers update the others meanwhile: change all of them (optimizer.state.clear()), or "
                    "use strategy='sync_ps'"
                )
            before = {parameters[number]: state for number, state in self._states().items()}
        self._send_states({**before, **changes})

    def _send_states(self, state_of: Mapping[Parameter, Mapping[str, Any]]) -> None:
        """On worker 0: gives the servers these states instead of all that they have."""
        if self._servers.worker != 0:
            return
        values = [_values(group) for group in self.optimizer.param_groups]
        states = self._states_by_server(state_of)
        asked = [self._servers.ask(server, "load", self._number, values, states[server]) for server in self._asked]
        for answer in asked:
            answer.get()

    def _states_by_server(self, state_of: Mapping[Parameter, Mapping[str, Any]]) -> list[_States]:
        """States of parameters as the servers have them: by bucket and place."""
        found: list[_States] = [{} for _ in range(self._servers.job.num_servers)]
        for parameter, state in state_of.items():
            for bucket, part, index in self._pieces.get(parameter, []) if state else ():
                of_piece = {name: part.pieces[index].part_of(value) for name, value in state.items()}
                # Copies: pickle would keep one counter of steps for all pieces of a tensor.
                found[part.server][bucket.number, index] = copy.deepcopy(of_piece)
        return found

    # Where things are

    def _place_new(self) -> None:
        """Sends the servers the parameters that the optimizer has got since; a collective."""
        can_be_trained = (p for p in self._parameters() if p.is_floating_point() or p.is_complex())
        new = [parameter for parameter in can_be_trained if parameter not in self._pieces]
        groups = [[id(parameter) for parameter in group["params"]] for group in self.optimizer.param_groups]
        if not new and groups == self._groups:
            return
        self._groups = groups
        first = len(self._buckets)
        for parameters in alike(new):
            self._make_buckets(parameters)  # type: ignore[arg-type]
        self._tell_plans(self._buckets[first:], new)
        for parameter in new if self._watched is None else ():
            self.optimizer.state.pop(parameter, None)
        if not self._servers.is_synchronous:
            self.pull()
        self._complete_sums()

    def _make_buckets(self, parameters: list[Parameter]) -> None:
        """Cuts parameters of one dtype and device into buckets, and these into the servers' parts."""
        dtype = parameters[0].dtype
        placed = bucket_parts(
            [parameter.numel() for parameter in parameters],
            self._servers.job.num_servers,
            self._split,
            full_numel=self._bucket_bytes / dtype.itemsize,
        )
        for by_server in placed:
            parts = [
                _Part(server, [_Piece(parameters[p.number], p.start, p.stop, p.offset) for p in pieces], dtype)
                for server, pieces in enumerate(by_server)
                if pieces
            ]
            of_parts = dict.fromkeys(piece.parameter for part in parts for piece in part.pieces)
            bucket = _Bucket(self._servers.new_bucket(), [*of_parts], parts)
            for part in parts:
                for index, piece in enumerate(part.pieces):
                    self._pieces.setdefault(piece.parameter, []).append((bucket, part, index))
            self._buckets.append(bucket)
            for parameter in bucket.parameters:
                self._hooks.append(call_on_gradient(parameter, functools.partial(self._gradient_is_ready, bucket)))
        for parameter in parameters:
            self._pieces.setdefault(parameter, []).sort(key=lambda found: found[1].pieces[found[2]].start)

    def _tell_plans(self, buckets: Sequence[_Bucket], new: Iterable[Parameter]) -> None:
        """Tells the servers of new parameters, and gets the memory for them."""
        states = self._states_by_server({p: s for p in new if (s := self._given_states().get(p))})
        answers = {}
        for server in self._asked:
            parts = [(bucket, part) for bucket in buckets for part in bucket.parts if part.server == server]
            contents = None
            if self._servers.worker == 0:
                values = [_values(group) for group in self.optimizer.param_groups]
                weights = [part.joined_weights() for _, part in parts]
                contents = Contents(weights, dict(self.optimizer.defaults), values, states[server])
            plan = self._plan(server, parts)
            answers[server] = parts, self._servers.ask(server, "place", self._number, plan, contents)
        for server, (parts, answer) in answers.items():
            flats = [torch.empty(part.numel, dtype=part.dtype) for _, part in parts]
            to_push = [room_bytes(flat, self._compressor) for flat in flats]
            if (offers := answer.get()) is not None:
                pushed, pulled = offers
                memories = [*cut(mapped(pushed), to_push)]
                copies = cut(mapped(pulled), [flat.nbytes for flat in flats])
                flats = [copy.view(flat.dtype) for copy, flat in zip(copies, flats, strict=True)]
            else:
                memories = [torch.empty(size, dtype=torch.uint8) for size in to_push]
            for (bucket, _), memory, flat in zip(parts, memories, flats, strict=True):
                pair, on_wire = self._servers.pairs[server], wire_bytes(flat, self._compressor)
                room = bucket.rooms[server] = Room(pair, bucket.number, memory, flat, on_wire, offers is not None)
                room.expect_pull()

    def _plan(self, server: int, parts: Sequence[tuple[_Bucket, _Part]]) -> Plan:
        shapes = [
            (bucket.number, part.dtype, [_shape(piece) for piece in part.pieces]) for bucket, part in parts
        ]  # fmt: skip
        groups = [
            [
                (bucket.number, index)
                for parameter in group["params"]
                for bucket, part, index in self._pieces.get(parameter, [])
                if part.server == server
            ]
            for group in self.optimizer.param_groups
        ]
        return Plan(type(self.optimizer), self._split, self._compressor, shapes, groups)

    def _complete_sums(self) -> None:
        """On worker 0: takes checksums of the parts that have none, which new ones have not."""
        if self._servers.worker == 0:
            self._sums.update(_sums_of(part for _, part in self._parts() if part not in self._sums))

    def _changed(self) -> list[tuple[_Bucket, _Part]]:
        """On worker 0 the parts whose weights have changed since they came; elsewhere none."""
        if self._servers.worker != 0:
            return []
        now = _sums_of(part for _, part in self._parts())
        return [(bucket, part) for bucket, part in self._parts() if now[part] != self._sums.get(part)]

    # Push

    def _gradient_is_ready(self, bucket: _Bucket, parameter: Parameter) -> None:
        """Pushes a bucket when backward has the last of its gradients."""
        if not self.pushes_early or parameter.grad is None:
            return
        bucket.ready.add(parameter)
        awaited = (each for each in bucket.parameters if each.requires_grad and each not in bucket.ready)
        if bucket.pushed is None and next(awaited, None) is None:
            self._push(bucket)

    def _push_rest(self, buckets: Iterable[_Bucket]) -> None:
        """Pushes what backward has not pushed, and again what has changed since."""
        if self.gradients_are_whole and self._servers.worker != 0:
            return
        for bucket in buckets:
            if bucket.pushed is None or bucket.is_stale():
                self._push(bucket)

    def _push(self, bucket: _Bucket) -> None:
        bucket.pushed = bucket.gradients()
        bucket.num_pushes += 1
        for part in bucket.parts:
            gradients, event = self._on_host(part)
            self._post_push(part, bucket.rooms[part.server], gradients, event)

    def _post_push(self, part: _Part, room: Room, gradients: list[Tensor], event: torch.cuda.Event | None) -> None:
        is_whole, round_ = self.gradients_are_whole, self._round
        # What is the average already is taken as it is.
        compressor = None if is_whole or part.dtype != torch.float32 else self._compressor
        size_bytes = part.nbytes if compressor is None else room.wire_bytes
        transfer = self._servers.meter.begin(
            "push",
            group="servers",
            group_size=self._servers.job.num_workers,
            size_bytes=size_bytes,
            memory_bytes=size_bytes if room.is_shared else 0,
            awaited=False,
        )

        def push() -> None:
            try:
                if event is not None:
                    event.synchronize()
                if compressor is None:
                    torch.cat(gradients, out=room.pushed)
                else:
                    part.encode(torch.cat(gradients), compressor, round_, room.wire)
                room.push(is_whole=is_whole)
            finally:
                transfer.finish()

        self._pushing.append((part.server, self._servers.in_background(part.server, push)))

    def _on_host(self, part: _Part) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """The gradients of a part, dense and in host memory, and the event after which they are there.

        Zeros where this worker has none. On a CPU they are the gradients themselves.
        """
        found = []
        for piece in part.pieces:
            gradient = piece.parameter.grad
            if gradient is None:
                found.append(torch.zeros(piece.stop - piece.start, dtype=part.dtype))
                continue
            gradient = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            found.append(piece.of(gradient.to(part.dtype).contiguous()))
        device = part.pieces[0].parameter.device
        if device.type != "cuda":
            return [gradient.cpu() for gradient in found], None
        if self._copying is None:
            self._copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copying.wait_stream(torch.cuda.current_stream(device))
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        rooms = [torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True) for gradient in found]
        with torch.cuda.stream(self._copying):
            for room, gradient in zip(rooms, found, strict=True):
                room.copy_(gradient, non_blocking=True)
                if gradient.is_cuda:
                    gradient.record_stream(self._copying)
            event.record(self._copying)
        return rooms, event

    # Ask, and pull

    def _ask(self, active: list[_Bucket], *, is_step: bool, changed: Sequence[tuple[_Bucket, _Part]] = ()) -> list[Any]:
        """Pushes gradients, asks all servers for the same, and takes the weights that they send; their answers."""
        servers, parts = self._servers, [(bucket, part) for bucket in active for part in bucket.parts]
        self._push_rest(active)
        start_s = servers.meter.now()
        size_bytes = sum(part.nbytes for _, part in parts)
        described = {"group": "servers", "group_size": servers.job.num_workers, "size_bytes": size_bytes}
        with servers.meter.metered("pull", **described), servers.reported():
            answers: dict[int, Answer] = {}
            norms = self.clip_norm is not None and is_step and servers.job.num_servers > 1
            squares: dict[int, Answer] = {}
            for server in self._asked:
                if norms and (servers.worker == 0 or not servers.is_synchronous):
                    squares[server] = servers.expect(server)
                request = self._request(server, parts, is_step=is_step, weights=_weights_for(server, changed))
                answers[server] = servers.ask(server, "ask", self._number, request)
            for server, future in self._pushing:
                with answers[server].arriving():
                    future.result()
            total = sum(answer.get() for answer in squares.values())
            for server in squares:
                servers.pairs[server].send(total)
            if is_step:
                self._take_weights(active, answers)
            else:
                averages = []
                for bucket, part in parts:
                    with answers[part.server].arriving():
                        averages.append(bucket.rooms[part.server].await_pull(averages=True))
            found = {server: answer.get() for server, answer in answers.items()}
            if not is_step:
                for (bucket, part), average in zip(parts, averages, strict=True):
                    self._take_averages(bucket, part, average, *found[part.server])
        servers.meter.waited(start_s, servers.meter.now())
        self._pushing.clear()
        for bucket in active:
            bucket.pushed, bucket.num_pushes = None, 0
            bucket.ready.clear()
        self._round += 1
        return [*found.values()]

    def _request(
        self, server: int, parts: Sequence[tuple[_Bucket, _Part]], *, is_step: bool, weights: dict[int, Tensor]
    ) -> Request:
        own = [(bucket, part) for bucket, part in parts if part.server == server]
        gradients = {(b.number, i): piece for b, part in own for i, piece in enumerate(part.pieces)}
        return Request(
            is_step=is_step,
            is_whole=self.gradients_are_whole,
            pushes={bucket.number: bucket.num_pushes for bucket, _ in own},
            kinds={bucket.number: [kind_of(piece.parameter.grad) for piece in part.pieces] for bucket, part in own},
            rows={
                place: rows_of(gradient)
                for place, piece in gradients.items()
                if (gradient := piece.parameter.grad) is not None and gradient.is_sparse and piece.is_whole
            },
            values=[_values(g) for g in self.optimizer.param_groups] if is_step and self._servers.worker == 0 else [],
            weights=weights,
            num_changed=self._num_changed,
            clip_norm=self.clip_norm if is_step else None,
            clip_value=self.clip_value if is_step else None,
        )

    def _take_weights(self, buckets: Iterable[_Bucket], answers: Mapping[int, Answer]) -> None:
        """Waits for weights, and takes them as they come."""
        for bucket in buckets:
            for part in bucket.parts:
                room = bucket.rooms[part.server]
                with answers[part.server].arriving():
                    weights = room.await_pull(averages=False)
                for piece in part.pieces:
                    piece.fill(piece.parameter, piece.place(weights))
                room.expect_pull()
                if self._servers.worker == 0:  # while others are on their way
                    self._sums.update(_sums_of([part]))

    def _take_averages(
        self,
        bucket: _Bucket,
        part: _Part,
        averages: Tensor,
        kinds: Mapping[int, list[int]],
        rows: Mapping[tuple[int, int], Tensor],
    ) -> None:
        """Takes the averages of a part, for the parameters that have a gradient on some worker."""
        for index, (piece, kind) in enumerate(zip(part.pieces, kinds[bucket.number], strict=True)):
            parameter = piece.parameter
            if kind == ABSENT:
                continue
            if parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = torch.zeros_like(parameter)
            piece.fill(parameter.grad, piece.place(averages))
            if kind == SPARSE and piece.is_whole:
                parameter.grad = sparse(parameter.grad, rows.get((bucket.number, index)))
        bucket.rooms[part.server].expect_pull()


def _check_importable(optimizer: Optimizer) -> None:
    """Raises ValueError if a server cannot import the class of an optimizer."""
    kind = type(optimizer)
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise ValueError(
            f"a parameter server cannot import {kind.__qualname__}, which is defined in "
            f"{'the script' if kind.__module__ == '__main__' else 'a function'}: move it to a module beside the script"
        )


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _weights_for(server: int, parts: Iterable[tuple[_Bucket, _Part]]) -> dict[int, Tensor]:
    """The weights of a server's parts, by bucket."""
    return {bucket.number: part.joined_weights() for bucket, part in parts if part.server == server}


def _shape(piece: _Piece) -> torch.Size:
    return piece.parameter.shape if piece.is_whole else torch.Size([piece.stop - piece.start])


def _sums_of(parts: Iterable[_Part]) -> dict[_Part, list[int]]:
    """Numbers for the weights of parts, by which a hook's change of them is seen."""
    parts = list(parts)
    numbers = iter(checksums([piece.of(piece.parameter) for part in parts for piece in part.pieces]))
    return {part: [next(numbers) for _ in part.pieces] for part in parts}


def _joined(values: Sequence[Any], parameter: Parameter) -> Any:
    """A value of a parameter's state out of those of its pieces."""
    first = values[0]
    if len(values) == 1 or not isinstance(first, Tensor) or first.dim() == 0:
        return first
    return torch.cat([value.reshape(-1) for value in values]).view(parameter.shape)
