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

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_multigpu.communication.channel import Channel
from lightning_multigpu.communication.checksums import bytes_of, checksums
from lightning_multigpu.communication.compression.compressors import ElementwiseCompressor
from lightning_multigpu.communication.tensors import alike
from lightning_multigpu.engine.gradient_kinds import ABSENT, SPARSE, kind_of, rows_of, sparse
from lightning_multigpu.engine.optimizer_split import Split
from lightning_multigpu.engine.parameter_server.bucket_memory import BucketMemory, copy_out
from lightning_multigpu.engine.parameter_server.server_connections import Fields, ServerConnections
from lightning_multigpu.engine.parameter_server.sharding import bucket_parts, imbalance_of
from lightning_multigpu.engine.parameter_server.wire import (
    WireError,
    class_path,
    dtype_name,
    packed,
    unpacked,
)
from lightning_multigpu.engine.redirected_optimizer import (
    RedirectedOptimizer,
    call_on_gradient,
    part_of,
)


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


@dataclass(frozen=True)
class _Part:
    """What one server has of a bucket."""

    server: int
    bucket: int
    pieces: list[_Piece]
    dtype: torch.dtype
    errors: dict[int, Tensor] = field(default_factory=dict)

    def encoded(self, gradients: Tensor, compressor: ElementwiseCompressor, round_: int) -> Tensor:
        """Gradients on the wire, changed in place; the error is added to those of the next round.

        A second push of a round takes the place of the first, and begins with the same errors.
        """
        earlier = max((of_round for of_round in self.errors if of_round < round_), default=None)
        if earlier is not None:
            before = self.errors[earlier]
            self.errors.clear()
            self.errors[earlier] = before
            gradients += before
        wire = torch.empty(compressor.encoded_bytes(gradients.numel()), dtype=torch.uint8)
        compressor.encode(gradients, wire)
        if compressor.has_error_feedback:
            self.errors[round_] = gradients
        return wire

    @property
    def numel(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(eq=False)
class _Bucket:
    """Parameters of one dtype and device whose gradients travel together."""

    parameters: list[Parameter]
    parts: list[_Part]
    ready: set[Parameter] = field(default_factory=set)
    pushed: list[tuple[Tensor | None, int]] | None = None

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
        servers: ServerConnections,
        *,
        split: Split | None = None,
        bucket_bytes: int = 4 * 2**20,
        compressor: ElementwiseCompressor | None = None,
    ) -> None:
        self._class_path = class_path(optimizer)
        super().__init__(optimizer, split)
        self.version = 0
        self._servers = servers
        self._bucket_bytes = bucket_bytes
        self._compressor = compressor
        self._buckets: list[_Bucket] = []
        self._pieces: dict[Parameter, list[tuple[_Part, int]]] = {}
        self._plans = 0
        self._groups: list[list[int]] = []
        self._num_changed = 0
        self._round = 0
        self._targets: dict[tuple[int, int], tuple[list[memoryview], int, bool]] = {}
        self._squares: dict[int, float] = {}
        self._is_replacing = False  # weights are on their way to servers, and the next request must come after them
        self._kinds: dict[Parameter, int] = {}
        self._rows: dict[Parameter, Tensor] = {}
        self._sums: dict[tuple[int, int], list[int]] = {}
        self._hooks: list[Any] = []
        self._copying: torch.cuda.Stream | None = None
        self._number = servers.new_number(self)

    @property
    def imbalance(self) -> float:
        """The largest shard in proportion to an even one; 1.0 is even."""
        self._place_new()
        sizes = [0] * self._servers.num_servers
        for bucket in self._buckets:
            for part in bucket.parts:
                sizes[part.server] += part.nbytes
        return imbalance_of(sizes)

    def close(self) -> None:
        """Gives the optimizer its own ``step`` back, and pushes nothing from now on."""
        super().close()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._buckets, self._pieces = [], [], {}
        self._targets.clear()

    def average_gradients(self) -> None:
        if not self._servers.consistency.is_synchronous:  # a worker's gradients are its own
            return
        self._place_new()
        self.gradients_are_whole = False  # backward has added to what was averaged before
        self._push_rest()
        staged = self._expect(gradients=True)
        self._ask("average", is_urgent=False)
        for parameter, kind in self._kinds.items():
            if kind != ABSENT and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for piece, place in self._arrived(staged):
            parameter = piece.parameter
            assert parameter.grad is not None
            if parameter.grad.is_sparse:
                parameter.grad = torch.zeros_like(parameter)
            piece.fill(parameter.grad, place)
        for parameter, kind in self._kinds.items():
            if kind == SPARSE and parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad = sparse(parameter.grad, self._rows.get(parameter))
        self.gradients_are_whole = True

    def _step(self) -> None:
        """Push gradients, have the servers step, pull all weights."""
        if self._servers.consistency.is_synchronous:
            self.send_changed_weights()
        elif self._changed():
            raise ValueError(
                "a hook has changed weights in place, and other workers have made updates to them meanwhile, which "
                "would be lost: use strategy='sync_ps' with that hook"
            )
        is_urgent = self._push_rest()
        staged = self._expect()
        self._ask(
            "step",
            is_urgent=is_urgent,
            given_by_one=self.gradients_are_whole,
            values=[self._values(group) for group in self.optimizer.param_groups] if self._servers.worker == 0 else [],
            clip_norm=self.clip_norm,
            clip_value=self.clip_value,
            num_changed=self._num_changed,
        )
        self._num_changed = 0
        for piece, place in self._arrived(staged):
            piece.fill(piece.parameter, place)
        self._complete_sums()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # as its own step would tell LR schedulers

    @torch.no_grad()
    def pull(self) -> None:
        """Gets the newest weights."""
        staged = self._expect()
        self._post_to_all({"kind": "pull", "optimizer": self._number})
        self._await_parts()
        for piece, place in staged:
            piece.fill(piece.parameter, place)
        self._complete_sums()

    def _asked(self) -> list[int]:
        """The servers with a part. A server without one would begin the next round before the others."""
        return sorted({part.server for bucket in self._buckets for part in bucket.parts if part.pieces})

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
        found: dict[int, dict[str, Any]] = {}
        for server in range(self._servers.num_servers):
            self._servers.post(server, {"kind": "state", "optimizer": self._number})
        told: dict[tuple[int, int, int], dict[str, Any]] = {}
        for server, (fields, tensors) in enumerate(self._servers.answers("state")):
            for bucket, index, state in unpacked(fields["body"], tensors):
                told[server, bucket, index] = state
        for number, parameter in enumerate(self._parameters()):
            pieces = self._pieces.get(parameter, [])
            states = [told.get((part.server, part.bucket, index)) for part, index in pieces]
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
            if not self._servers.consistency.is_synchronous:
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
        states: list[list[Any]] = [[] for _ in range(self._servers.num_servers)]
        for parameter, state in state_of.items():
            for part, index in self._pieces.get(parameter, []) if state else ():
                piece = part.pieces[index]
                states[part.server].append(
                    [part.bucket, index, {name: piece.part_of(value) for name, value in state.items()}]
                )
        values = [self._values(group) for group in self.optimizer.param_groups]
        for server in range(self._servers.num_servers):
            self._servers.post_value(
                server,
                {"kind": "load", "optimizer": self._number},
                {"values": values, "state": states[server]},
                f"a state of {type(self.optimizer).__name__}",
            )
        self._servers.answers("done")

    # Where things are

    def _place_new(self) -> None:
        """Sends the servers the parameters that the optimizer has got since; a collective."""
        can_be_trained = (p for p in self._parameters() if p.is_floating_point() or p.is_complex())
        new = [parameter for parameter in can_be_trained if parameter not in self._pieces]
        groups = [[id(parameter) for parameter in group["params"]] for group in self.optimizer.param_groups]
        if not new and self._plans and groups == self._groups:
            return
        self._groups = groups
        first = len(self._buckets)
        for parameters in alike(new):
            self._make_buckets(parameters)  # type: ignore[arg-type]
        self._configure(self._buckets[first:])
        for parameter in new if self._watched is None else ():
            self.optimizer.state.pop(parameter, None)
        self._plans += 1
        if not self._servers.consistency.is_synchronous:
            self.pull()
        self._complete_sums()

    def _make_buckets(self, parameters: list[Parameter]) -> None:
        """Cuts parameters of one dtype and device into buckets, and these into the servers' parts."""
        dtype = parameters[0].dtype
        placed = bucket_parts(
            [parameter.numel() for parameter in parameters],
            self._servers.num_servers,
            self._split,
            full_numel=self._bucket_bytes / dtype.itemsize,
        )
        for by_server in placed:
            number = len(self._buckets)
            parts = [
                _Part(server, number, [_Piece(parameters[p.number], p.start, p.stop, p.offset) for p in pieces], dtype)
                for server, pieces in enumerate(by_server)
            ]
            bucket = _Bucket([], parts)
            for part in parts:
                for index, piece in enumerate(part.pieces):
                    self._pieces.setdefault(piece.parameter, []).append((part, index))
            bucket.parameters += dict.fromkeys(piece.parameter for part in parts for piece in part.pieces)
            self._buckets.append(bucket)
            for parameter in bucket.parameters:
                self._hooks.append(call_on_gradient(parameter, functools.partial(self._gradient_is_ready, bucket)))
        for parameter in parameters:
            self._pieces.setdefault(parameter, []).sort(key=lambda found: found[0].pieces[found[1]].start)

    def _configure(self, buckets: list[_Bucket]) -> None:
        """Sends the servers new buckets."""
        servers, is_first = self._servers, self._servers.worker == 0
        together = servers.consistency.is_synchronous
        if together and not is_first:
            servers.gather(None)  # worker 0's plan comes first
        for server in range(servers.num_servers):
            parts = [bucket.parts[server] for bucket in buckets]
            fields = {
                "kind": "configure",
                "optimizer": self._number,
                "number": self._plans,
                "plan": self._plan(server, parts),
            }
            content = self._content(parts) if is_first else None
            servers.post_value(server, fields, content, f"an option of {type(self.optimizer).__name__}")
        servers.answers("done")
        if together and is_first:
            servers.gather(None)

    def _plan(self, server: int, parts: Sequence[_Part]) -> dict[str, Any]:
        """What all workers must have in common."""
        buckets = [
            {
                "dtype": dtype_name(part.dtype),
                "pieces": [list(p.parameter.shape) if p.is_whole else [p.stop - p.start] for p in part.pieces],
            }
            for part in parts
        ]
        groups = [
            [
                [part.bucket, index]
                for parameter in group["params"]
                for part, index in self._pieces.get(parameter, [])
                if part.server == server
            ]
            for group in self.optimizer.param_groups
        ]
        compression = None
        if self._compressor is not None:
            compression = {"name": self._compressor.name, **asdict(self._compressor)}  # type: ignore[call-overload]
        return {
            "class": self._class_path,
            "split": self._split,
            "compression": compression,
            "buckets": buckets,
            "groups": groups,
        }

    def _content(self, parts: Sequence[_Part]) -> dict[str, Any]:
        """What worker 0 sends: values of the groups, weights, and the state with which some optimizers begin."""
        return {
            "defaults": dict(self.optimizer.defaults),
            "values": [self._values(group) for group in self.optimizer.param_groups],
            "weights": [self._joined_weights(part) for part in parts],
            "state": [
                [number, index, {name: piece.part_of(value) for name, value in state.items()}]
                for number, part in enumerate(parts)
                for index, piece in enumerate(part.pieces)
                if (state := self._given_states().get(piece.parameter))
            ],
        }

    def _joined_weights(self, part: _Part) -> Tensor:
        pieces = [piece.of(piece.parameter).cpu() for piece in part.pieces]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=part.dtype)

    def _values(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in group.items() if name != "params"}

    def _complete_sums(self) -> None:
        """On worker 0: takes checksums of the parts that have none, which new and staged parts have not."""
        if self._servers.worker == 0:
            parts = [part for bucket in self._buckets for part in bucket.parts]
            self._sums.update(_sums_of(part for part in parts if (part.server, part.bucket) not in self._sums))

    def _changed(self) -> list[_Part]:
        """On worker 0 the parts whose weights have changed since they came; elsewhere none."""
        parts = [part for bucket in self._buckets for part in bucket.parts if self._servers.worker == 0]
        now = _sums_of(parts)
        return [part for part in parts if now[part.server, part.bucket] != self._sums.get((part.server, part.bucket))]

    def send_changed_weights(self) -> bool:
        """On worker 0: sends the weights that have changed since they came: by a hook, or by a checkpoint.

        Returns:
            Whether there were any.
        """
        changed = self._changed()
        self._is_replacing |= bool(changed)
        for part in changed:
            fields = {"kind": "replace", "optimizer": self._number, "bucket": part.bucket}
            self._servers.post(part.server, fields, [bytes_of(self._joined_weights(part))])
        return bool(changed)

    # Push

    def _gradient_is_ready(self, bucket: _Bucket, parameter: Parameter) -> None:
        """Pushes a bucket when backward has the last of its gradients."""
        if not self.pushes_early or parameter.grad is None:
            return
        bucket.ready.add(parameter)
        awaited = (each for each in bucket.parameters if each.requires_grad and each not in bucket.ready)
        if bucket.pushed is None and next(awaited, None) is None:
            self._push(bucket)

    def _push_rest(self) -> bool:
        """Pushes what backward has not pushed; False if something is pushed again, and must arrive before a step."""
        pushed_again = False
        for bucket in self._buckets:
            if self.gradients_are_whole and self._servers.worker != 0:
                continue
            if bucket.pushed is None:
                self._push(bucket)
            elif bucket.is_stale():
                self._push(bucket)
                pushed_again = True
        return not pushed_again

    def _push(self, bucket: _Bucket) -> None:
        bucket.pushed = bucket.gradients()
        for part in bucket.parts:
            if not part.pieces:
                continue
            kinds = [kind_of(piece.parameter.grad) for piece in part.pieces]
            gradients, event = self._on_host(part) if any(kinds) else ([], None)
            self._post_push(part, kinds, gradients, event)

    def _post_push(
        self, part: _Part, kinds: list[int], gradients: list[Tensor], event: torch.cuda.Event | None
    ) -> None:
        # What is the average already is taken as it is.
        compressor = None if self.gradients_are_whole or part.dtype != torch.float32 else self._compressor
        nbytes = part.nbytes if compressor is None else compressor.encoded_bytes(part.numel)
        round_ = self._round

        def payload() -> list[memoryview]:
            if event is not None:
                event.synchronize()
            if compressor is None or not gradients:
                return [bytes_of(gradient) for gradient in gradients]
            return [bytes_of(part.encoded(torch.cat(gradients), compressor, round_))]

        fields = {
            "kind": "push",
            "optimizer": self._number,
            "bucket": part.bucket,
            "round": self._round,
            "kinds": kinds,
            "is_compressed": compressor is not None,
            "rows": [
                [index, rows_of(piece.parameter.grad).nonzero().flatten().tolist()]
                for index, piece in enumerate(part.pieces)
                if kinds[index] == SPARSE and piece.is_whole and piece.parameter.grad is not None
            ],
        }
        self._servers.post(part.server, fields, payload, is_urgent=False, push_bytes=nbytes if gradients else 0)

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

    def _expect(self, *, gradients: bool = False) -> list[tuple[_Piece, Tensor]]:
        """Sets the memory for the weights or gradients that servers send; returns the pieces that need a copy then."""
        staged: list[tuple[_Piece, Tensor]] = []
        self._kinds, self._rows = {}, {}
        for bucket in self._buckets:
            for part in bucket.parts:
                if not part.pieces:
                    continue
                room: Tensor | None = None
                views = []
                for piece in part.pieces:
                    target = piece.parameter.grad if gradients else piece.parameter
                    if target is None or not _is_in_reach(target, part.dtype):
                        room = torch.empty(part.numel, dtype=part.dtype) if room is None else room
                        place = piece.place(room)
                        staged.append((piece, place))
                    else:
                        place = piece.of(target)
                    views.append(bytes_of(place))
                is_summed = self._servers.worker == 0 and not gradients and room is None
                self._targets[part.server, part.bucket] = views, part.nbytes, is_summed
                if room is not None and not gradients:
                    self._sums.pop((part.server, part.bucket), None)
        return staged

    def _arrived(self, staged: list[tuple[_Piece, Tensor]]) -> list[tuple[_Piece, Tensor]]:
        """Without the pieces of parameters that had a gradient on no worker: nothing came for them."""
        return [(piece, place) for piece, place in staged if self._kinds.get(piece.parameter, ABSENT) != ABSENT]

    def _ask(self, kind: str, *, is_urgent: bool, **fields: Any) -> None:
        """Asks all servers for the same, and waits for what they send."""
        servers = self._servers
        tensors: list[Tensor] = []
        values = packed(fields.pop("values", []), tensors, what=f"an option of {type(self.optimizer).__name__}")
        size_bytes = sum(size for _, size, _ in self._targets.values())
        start_s = servers.meter.now()
        with servers.meter.metered("pull", group="servers", group_size=servers.num_workers, size_bytes=size_bytes):
            message = {"kind": kind, "optimizer": self._number, "round": self._round, "values": values, **fields}
            payload = [bytes_of(tensor) for tensor in tensors]
            self._post_to_all(message, payload, is_urgent=is_urgent, is_first=is_urgent and not self._is_replacing)
            is_told_squares = servers.worker == 0 or not servers.consistency.is_synchronous
            if self.clip_norm is not None and kind == "step" and servers.num_servers > 1 and is_told_squares:
                asked = self._asked()
                servers.wait_until(lambda: self._squares.keys() >= {*asked})
                squares = sum(self._squares[server] for server in asked)
                for server in asked:
                    servers.post(server, {"kind": "norm", "optimizer": self._number, "squares": squares}, is_first=True)
            self._await_parts()
        servers.meter.waited(start_s, servers.meter.now())
        self._squares.clear()
        for bucket in self._buckets:
            bucket.pushed = None
            bucket.ready.clear()
        self._round += 1

    def _post_to_all(
        self, message: Fields, payload: Sequence[memoryview] = (), *, is_urgent: bool = True, is_first: bool = False
    ) -> None:
        """Asks all servers for their parts."""
        for server in self._asked():
            self._servers.post(server, message, payload, is_urgent=is_urgent, is_first=is_first)

    def _await_parts(self) -> None:
        """Waits until all parts are there."""
        self._servers.wait_until(lambda: not self._targets)
        self._is_replacing = False

    def receive(
        self, server: int, fields: Fields, payload_bytes: int, channel: Channel, memory: BucketMemory | None
    ) -> None:
        """Takes a part that a server sends, or has in memory; on the thread that reads from it."""
        if fields["kind"] == "squares":
            with self._servers.arriving():
                self._squares[server] = float(fields["squares"])
            return
        views, size_bytes, is_summed = self._targets.get((server, fields.get("bucket", -1)), (None, 0, False))
        kinds = fields.get("kinds")
        if views is None or payload_bytes not in (0, size_bytes) or not isinstance(kinds, list):
            raise WireError(f"a part of {payload_bytes} bytes that nobody waits for")
        if "in_memory" in fields:
            assert memory is not None
            copy_out({"pushed": memory.pushed, "weights": memory.weights}[fields["in_memory"]], views)
        elif payload_bytes:
            channel.receive_into(views)
        part = self._buckets[fields["bucket"]].parts[server]
        if is_summed:  # here, while the other parts are still on their way
            self._sums.update(_sums_of([part]))
        with self._servers.arriving():
            pieces = part.pieces
            self.version = max(self.version, fields.get("version", 0))
            self._kinds.update(zip((piece.parameter for piece in pieces), kinds, strict=True))
            for index, rows in fields.get("rows", ()):
                parameter = pieces[index].parameter
                self._rows[parameter] = torch.zeros(len(parameter), dtype=torch.bool)
                self._rows[parameter][rows] = True
            del self._targets[server, fields["bucket"]]


def _sums_of(parts: Iterable[_Part]) -> dict[tuple[int, int], list[int]]:
    """Numbers for the weights of parts, by which a hook's change of them is seen."""
    parts = list(parts)
    numbers = iter(checksums([piece.of(piece.parameter) for part in parts for piece in part.pieces]))
    return {(part.server, part.bucket): [next(numbers) for _ in part.pieces] for part in parts}


def _is_in_reach(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether bytes can be received straight into the tensor."""
    return tensor.device.type == "cpu" and not tensor.is_sparse and tensor.is_contiguous() and tensor.dtype == dtype


def _joined(values: Sequence[Any], parameter: Parameter) -> Any:
    """A value of a parameter's state out of those of its pieces."""
    first = values[0]
    if len(values) == 1 or not isinstance(first, Tensor) or first.dim() == 0:
        return first
    return torch.cat([value.reshape(-1) for value in values]).view(parameter.shape)
