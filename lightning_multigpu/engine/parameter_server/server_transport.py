"""A worker's side of parameter servers, as the transport of a step: gradients are pushed, and new weights are pulled.

The values of the optimizer's groups travel with every step, and its state lives on the servers::

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_multigpu.communication.checksums import checksums
from lightning_multigpu.communication.shared_memory.segment import mapped
from lightning_multigpu.communication.tensors import alike, marks_of
from lightning_multigpu.engine.optimizer_state import StateElsewhere
from lightning_multigpu.engine.parameter_server.pair import Reply
from lightning_multigpu.engine.parameter_server.rooms import Room, cut
from lightning_multigpu.engine.parameter_server.served_shard import Plan, Pushed, Request
from lightning_multigpu.engine.parameter_server.servers import Servers
from lightning_multigpu.placement.gradient_kinds import as_dense
from lightning_multigpu.placement.owned_step import Update, call_on_gradient
from lightning_multigpu.placement.table import (
    Piece,
    bucket_parts,
    elements,
    fill,
    joined_state,
    part_of_state,
    split_of,
)

_States = dict[tuple[int, int], dict[str, Any]]


@dataclass(eq=False)
class _Part:
    """One server's part of a bucket."""

    bucket: int
    server: int
    pieces: list[tuple[Parameter, Piece]]
    dtype: torch.dtype
    room: Room = field(init=False)  # which the server offers

    @property
    def numel(self) -> int:
        return sum(piece.numel for _, piece in self.pieces)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def weights(self) -> list[Tensor]:
        """The weights of each piece, flat."""
        return [elements(parameter.detach(), piece).reshape(-1) for parameter, piece in self.pieces]


@dataclass(eq=False)
class _Bucket:
    """Parameters of one dtype and device whose gradients travel together; only the parts that have pieces."""

    parameters: list[Parameter]
    parts: list[_Part]
    ready: set[Parameter] = field(default_factory=set)
    pushed: list[Any] | None = None
    num_pushes: int = 0

    def gradients(self) -> list[Any]:
        """The gradients of now, with their marks."""
        gradients = [parameter.grad for parameter in self.parameters]
        return [(gradient, gradient is not None and marks_of([gradient])) for gradient in gradients]

    def is_stale(self) -> bool:
        """True if the gradients are no longer what was pushed."""
        now, pushed = self.gradients(), self.pushed or []
        return any(a is not b or x != y for (a, x), (b, y) in zip(now, pushed, strict=True))


class ServerTransport:
    """The :class:`~lightning_multigpu.placement.owned_step.Transport` of one optimizer to parameter servers.

    Args:
        optimizer: of a module that is the same on all workers.
        bucket_bytes: of gradients that travel together.

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
        bucket_bytes: int = 4 * 2**20,
    ) -> None:
        _check_importable(optimizer)
        self.version = 0
        self.pushes_early = False
        self._optimizer, self._servers, self._split = optimizer, servers, split_of(optimizer)
        self._bucket_bytes = bucket_bytes
        self._buckets: list[_Bucket] = []
        self._pieces: dict[Parameter, list[tuple[_Part, int]]] = {}
        self._groups: list[list[int]] | None = None
        self._pushing: list[tuple[int, Future[None]]] = []
        self._sums: dict[_Part, list[int]] = {}
        self._hooks: list[Any] = []
        self._copying: torch.cuda.Stream | None = None
        self._number = next(servers.numbers_of_optimizers)

    def view(self) -> StateElsewhere:
        return StateElsewhere(type(self._optimizer).__name__)

    def close(self) -> None:
        """Pushes nothing from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._buckets, self._pieces = [], [], {}

    def _parts(self) -> Iterator[_Part]:
        return (part for bucket in self._buckets for part in bucket.parts)

    @property
    def _asked(self) -> list[int]:
        """The servers that have a part."""
        return sorted({part.server for part in self._parts()})

    def step(self, update: Update) -> None:
        """Push gradients, have the servers step, pull all weights."""
        if update.options:
            raise TypeError(f"a step on servers takes a closure only, not {', '.join(update.options)}")
        changed = self._changed()
        if changed and not self._servers.job.is_synchronous:
            raise ValueError(
                "a hook has changed weights in place, and other workers have made updates to them meanwhile, which "
                "would be lost: use strategy='sync_ps' with that hook"
            )
        answers = self._ask(update, changed)
        self._sums.update(_sums_of(changed))
        if not self._servers.job.is_synchronous:
            self.version = max([self.version, *[version for version, _ in answers]])
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # as its own step would tell LR schedulers

    @torch.no_grad()
    def pull(self) -> None:
        """Gets the newest weights."""
        answers = {server: self._servers.ask(server, "pull", self._number) for server in self._asked}
        self._take_weights(self._parts(), answers)
        self.version = max([self.version, *[answer.get() for answer in answers.values()]])

    def send_changed_weights(self) -> bool:
        """On worker 0 of asynchronous workers: sends the weights that have changed since they came.

        Returns:
            Whether there were any: a hook or a checkpoint has changed them.
        """
        changed = self._changed()
        for server in {part.server for part in changed}:
            self._servers.tell(server, "replace", self._number, _weights_for(server, changed))
        self._sums.update(_sums_of(changed))
        return bool(changed)

    # States

    def states(self) -> dict[int, Any]:
        """On worker 0 the states of the servers; elsewhere none."""
        if self._servers.worker != 0:
            return {}
        asked = {server: self._servers.ask(server, "state", self._number) for server in self._asked}
        told = {server: answer.get() for server, answer in asked.items()}
        found: dict[int, Any] = {}
        for number, parameter in enumerate(self._parameters()):
            pieces = self._pieces.get(parameter, [])
            states = [told[part.server].get((part.bucket, index)) for part, index in pieces]
            if present := [state for state in states if state is not None]:
                found[number] = joined_state(present, parameter)
        return found

    def load(self, groups: list[dict[str, Any]], states: Mapping[Parameter, Any]) -> None:
        self._optimizer.load_state_dict({"state": {}, "param_groups": groups})
        self._send_states(states)

    def change(self, states: Mapping[Any, Any]) -> None:
        if not states or self._servers.worker != 0:
            return
        parameters, before = self._parameters(), {}
        if len(states) < len(parameters):
            if not self._servers.job.is_synchronous:
                raise ValueError(
                    f"the states of {len(states)} of {len(parameters)} parameters were changed in optimizer.state, "
                    "and other workers update the others meanwhile: change all of them (optimizer.state.clear()), or "
                    "use strategy='sync_ps'"
                )
            before = {parameters[number]: state for number, state in self.states().items()}
        self._send_states({**before, **states})

    def _send_states(self, state_of: Mapping[Any, Any]) -> None:
        """On worker 0: gives the servers these states instead of all that they have."""
        if self._servers.worker != 0:
            return
        values = [_values(group) for group in self._optimizer.param_groups]
        states = self._states_by_server(state_of)
        asked = [self._servers.ask(server, "load", self._number, values, states[server]) for server in self._asked]
        for answer in asked:
            answer.get()

    def _states_by_server(self, state_of: Mapping[Any, Any]) -> list[_States]:
        found: list[_States] = [{} for _ in range(self._servers.job.num_servers)]
        for parameter, state in state_of.items():
            for part, index in self._pieces.get(parameter, []) if state else ():
                # Copies: pickle would keep one counter of steps for all pieces of a tensor.
                of_piece = part_of_state(state, parameter, part.pieces[index][1])
                found[part.server][part.bucket, index] = tree_map_only(Tensor, Tensor.cpu, of_piece)
        return found

    # Where things are

    def _parameters(self) -> list[Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def place(self, new: list[Parameter], given: Mapping[Any, Any]) -> None:
        """Sends the servers new parameters, and groups that have changed."""
        groups = [[id(parameter) for parameter in group["params"]] for group in self._optimizer.param_groups]
        if not new and groups == self._groups:
            return
        self._groups = groups
        first = len(self._buckets)
        for parameters in alike(p for p in new if p.is_floating_point() or p.is_complex()):
            self._make_buckets(parameters)  # type: ignore[arg-type]
        self._tell_plans(self._buckets[first:], {p: state for p in new if (state := given.get(p))})
        if not self._servers.job.is_synchronous:
            self.pull()
        if self._servers.worker == 0:  # it takes checksums of the new parts
            self._sums.update(_sums_of(part for part in self._parts() if part not in self._sums))

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
            number = next(self._servers.numbers_of_buckets)
            parts = [
                _Part(number, server, [(parameters[piece.number], piece) for piece in pieces], dtype)
                for server, pieces in enumerate(by_server)
                if pieces
            ]
            for part in parts:
                for index, (parameter, _) in enumerate(part.pieces):
                    self._pieces.setdefault(parameter, []).append((part, index))
            bucket = _Bucket([*dict.fromkeys(parameter for part in parts for parameter, _ in part.pieces)], parts)
            self._buckets.append(bucket)
            for parameter in bucket.parameters:
                self._hooks.append(call_on_gradient(parameter, functools.partial(self._gradient_is_ready, bucket)))
        for parameter in parameters:
            self._pieces.setdefault(parameter, []).sort(key=lambda found: found[0].pieces[found[1]][1].start)

    def _tell_plans(self, buckets: Sequence[_Bucket], given: Mapping[Any, Any]) -> None:
        """Tells the servers of new parameters with their states, and gets the memory for them."""
        states = self._states_by_server(given)
        answers = {}
        for server in self._asked:
            parts = [part for bucket in buckets for part in bucket.parts if part.server == server]
            plan = self._plan(server, parts)
            if self._servers.worker == 0:
                values = [_values(group) for group in self._optimizer.param_groups]
                weights, defaults = [_joined(part) for part in parts], dict(self._optimizer.defaults)
                plan = replace(plan, weights=weights, defaults=defaults, values=values, states=states[server])
            answers[server] = parts, self._servers.ask(server, "place", self._number, plan)
        for server, (parts, answer) in answers.items():
            flats = [torch.empty(part.numel, dtype=part.dtype) for part in parts]
            pushed, pulled = [torch.empty_like(flat) for flat in flats], flats
            if (offers := answer.get()) is not None:
                pushed, pulled = ([*cut(mapped(offer), flats)] for offer in offers)
            for part, to_push, to_pull in zip(parts, pushed, pulled, strict=True):
                part.room = Room(self._servers.pairs[server], part.bucket, to_push, to_pull)
                part.room.expect_pull()

    def _plan(self, server: int, parts: Sequence[_Part]) -> Plan:
        shapes = [(part.bucket, part.dtype, [elements(*of).shape for of in part.pieces]) for part in parts]
        groups = [
            [
                (part.bucket, index)
                for parameter in group["params"]
                for part, index in self._pieces.get(parameter, [])
                if part.server == server
            ]
            for group in self._optimizer.param_groups
        ]
        return Plan(type(self._optimizer), self._split, shapes, groups)

    def _changed(self) -> list[_Part]:
        """On worker 0 the parts whose weights have changed since they came; elsewhere none."""
        if self._servers.worker != 0:
            return []
        now = _sums_of(self._parts())
        return [part for part in now if now[part] != self._sums.get(part)]

    # Push

    def _gradient_is_ready(self, bucket: _Bucket, parameter: Parameter) -> None:
        """Pushes a bucket when backward has the last of its gradients."""
        if not self.pushes_early or parameter.grad is None:
            return
        bucket.ready.add(parameter)
        awaited = (each for each in bucket.parameters if each.requires_grad and each not in bucket.ready)
        if bucket.pushed is None and next(awaited, None) is None:
            self._push(bucket)

    def _push(self, bucket: _Bucket) -> None:
        bucket.pushed = bucket.gradients()
        bucket.num_pushes += 1
        for part in bucket.parts:
            self._post_push(part)

    def _post_push(self, part: _Part) -> None:
        (gradients, event), room = self._on_host(part), part.room
        transfer = self._servers.meter.begin(
            "push",
            group="servers",
            group_size=self._servers.job.num_workers,
            size_bytes=part.nbytes,
            memory_bytes=part.nbytes if room.pair.shares_memory else 0,
            awaited=False,
        )

        def push() -> None:
            try:
                if event is not None:
                    event.synchronize()
                torch.cat(gradients, out=room.pushed)
                room.push()
            finally:
                transfer.finish()

        self._pushing.append((part.server, self._servers.background[part.server].submit(push)))

    def _on_host(self, part: _Part) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """The gradients of a part, dense and in host memory, and the event after which they are there.

        Zeros where this worker has none. On a CPU they are the gradients themselves.
        """
        found = []
        for parameter, piece in part.pieces:
            if (gradient := parameter.grad) is None:
                found.append(torch.zeros(piece.numel, dtype=part.dtype))
                continue
            gradient = as_dense(gradient.detach(), self._optimizer).to(part.dtype).contiguous()
            found.append(elements(gradient, piece).view(-1))
        device = part.pieces[0][0].device
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

    def _ask(self, update: Update, changed: Sequence[_Part]) -> list[Any]:
        """Pushes gradients, asks all servers for the update, and takes their weights; their answers."""
        # Buckets of frozen parameters are neither pushed nor pulled.
        active = [b for b in self._buckets if any(p.requires_grad or p.grad is not None for p in b.parameters)]
        servers, parts = self._servers, [part for bucket in active for part in bucket.parts]
        if servers.worker == 0 or not update.is_whole:
            for bucket in active:
                if bucket.pushed is None or bucket.is_stale():  # what backward has not pushed, and what has changed
                    self._push(bucket)
        start_s = servers.meter.now()
        size_bytes = sum(part.nbytes for part in parts)
        pull = servers.meter.begin("pull", group="servers", group_size=servers.job.num_workers, size_bytes=size_bytes)
        with pull:
            answers: dict[int, Reply] = {}
            norms = update.clip_norm is not None and servers.job.num_servers > 1
            squares: dict[int, Reply] = {}
            for server in self._asked:
                if norms and (servers.worker == 0 or not servers.job.is_synchronous):
                    squares[server] = servers.pairs[server].expect()
                values = [_values(g) for g in self._optimizer.param_groups] if servers.worker == 0 else []
                pushed = {
                    part.bucket: Pushed(bucket.num_pushes, [p.grad is not None for p, _ in part.pieces])
                    for bucket in active for part in bucket.parts if part.server == server
                }  # fmt: skip
                request = Request(update, pushed, values, _weights_for(server, changed))
                answers[server] = servers.ask(server, "ask", self._number, request)
            for server, future in self._pushing:
                with answers[server].arriving():
                    future.result()
            total = sum(answer.get() for answer in squares.values())
            for server in squares:
                servers.pairs[server].send(total)
            self._take_weights(parts, answers)
            found = [answer.get() for answer in answers.values()]
        servers.meter.waited(start_s, servers.meter.now())
        self._pushing.clear()
        for bucket in active:
            bucket.pushed, bucket.num_pushes = None, 0
            bucket.ready.clear()
        return found

    def _take_weights(self, parts: Iterable[_Part], answers: Mapping[int, Reply]) -> None:
        """Waits for weights, and takes them as they come."""
        for part in parts:
            with answers[part.server].arriving():
                weights = part.room.await_pull()
            for parameter, piece in part.pieces:
                fill(parameter, piece, weights[piece.offset : piece.end])
            part.room.expect_pull()
            if self._servers.worker == 0:  # while others are on their way
                self._sums.update(_sums_of([part]))


def _check_importable(optimizer: Optimizer) -> None:
    kind = type(optimizer)
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise ValueError(
            f"a parameter server cannot import {kind.__qualname__}, which is defined in "
            f"{'the script' if kind.__module__ == '__main__' else 'a function'}: move it to a module beside the script"
        )


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _joined(part: _Part) -> Tensor:
    """The weights of a part, flat, on the host."""
    return torch.cat([weights.cpu() for weights in part.weights])


def _weights_for(server: int, parts: Iterable[_Part]) -> dict[int, Tensor]:
    return {part.bucket: _joined(part) for part in parts if part.server == server}


def _sums_of(parts: Iterable[_Part]) -> dict[_Part, list[int]]:
    """Numbers for the weights of parts, by which a hook's change of them is seen."""
    parts = list(parts)
    numbers = iter(checksums([weights for part in parts for weights in part.weights]))
    return {part: [next(numbers) for _ in part.pieces] for part in parts}
