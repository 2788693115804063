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

import operator
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_multigpu.communication.checksums import checksums
from lightning_multigpu.communication.shared_memory.segment import mapped
from lightning_multigpu.communication.tensors import alike, marks_of, same_bytes
from lightning_multigpu.engine.optimizer_state import StateElsewhere
from lightning_multigpu.engine.parameter_server.pair import Room, cut
from lightning_multigpu.engine.parameter_server.served_shard import Plan, Request
from lightning_multigpu.engine.parameter_server.servers import Servers
from lightning_multigpu.placement.owned_step import Update, call_on_gradient
from lightning_multigpu.placement.table import (
    Piece,
    as_dense,
    bucket_parts,
    elements,
    fill,
    joined_state,
    part_of_state,
    placed,
    split_of,
)

_ZERO = torch.zeros(())


@dataclass(eq=False)
class _Part:
    """Pieces of parameters of one dtype and device that travel together to and from one server.

    Attributes:
        room: the memory for them, which the server offers.
        lacking: ids of the parameters of which backward has yet to give a gradient; None before the first one of a
            step.
        pushed: the gradients that were pushed for the next step, and the marks of those that are there; None if none
            were.
        sums: checksums of weights on a GPU that came, on worker 0; those on the host are compared with the room's.
    """

    number: int
    server: int
    pieces: list[tuple[Parameter, Piece]]
    room: Room = field(init=False)
    lacking: set[int] | None = None
    pushed: tuple[list[Tensor | None], list[Any]] | None = None
    num_pushes: int = 0
    sums: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dtype, self.device = self.pieces[0][0].dtype, self.pieces[0][0].device
        self.numel = sum(piece.numel for _, piece in self.pieces)
        self.nbytes = self.numel * self.dtype.itemsize

    def take_room(self, room: Room) -> None:
        """Takes the memory for pieces; they are copied in and out of it as they are shaped, all in one call."""
        self.room = room
        self.out, self.into = ([placed(flat, piece, p) for p, piece in self.pieces] for flat in (room.out, room.into))
        found = [(p, piece, into) for (p, piece), into in zip(self.pieces, self.into, strict=True)]
        self._cut = [each for each in found if each[1].numel != each[0].numel()]
        whole: list[tuple[Tensor, Tensor]] = [(p, into) for p, piece, into in found if piece.numel == p.numel()]
        self._whole = [p for p, _ in whole], [into for _, into in whole]

    def weights(self) -> list[Tensor]:
        """The weights of each piece, flat."""
        return [elements(parameter.detach(), piece).reshape(-1) for parameter, piece in self.pieces]

    def joined(self) -> Tensor:
        """The weights of all pieces, flat, on the host."""
        return torch.cat([weights.cpu() for weights in self.weights()])

    def note_weights(self, *, is_in_room: bool) -> None:
        """On worker 0: notes the weights of now, as :meth:`has_changed` compares them with those of later."""
        if self.device.type != "cpu":
            self.sums = checksums(self.weights())
        elif not is_in_room:
            self.room.into.copy_(self.joined())

    def has_changed(self) -> bool:
        """Whether a hook has changed weights since they were noted."""
        if self.device.type != "cpu":
            return checksums(self.weights()) != self.sums
        weights = (elements(parameter, piece).contiguous() for parameter, piece in self.pieces)
        return not all(map(same_bytes, weights, self.into))

    def fill(self) -> None:
        """Changes the weights to those that have come."""
        if self._whole[0]:
            torch._foreach_copy_(*self._whole)
        for each in self._cut:
            fill(*each)

    def gradients(self) -> tuple[list[Tensor | None], list[Any]]:
        """The gradients of now, and the marks of those that are there."""
        found = [parameter.grad for parameter, _ in self.pieces]
        return found, marks_of(gradient for gradient in found if gradient is not None)

    def is_stale(self) -> bool:
        """Whether the gradients of now have not been pushed."""
        if self.pushed is None:
            return True
        (now, marks), (pushed, marks_then) = self.gradients(), self.pushed
        return marks != marks_then or any(map(operator.is_not, now, pushed))


class ServerTransport:
    """The :class:`~lightning_multigpu.placement.owned_step.Transport` of one optimizer to parameter servers.

    Args:
        optimizer: of a module that is the same on all workers.
        bucket_bytes: of gradients that travel together.

    Attributes:
        version: of the weights that this worker has: the updates that all workers have made.

    Raises:
        ValueError: the optimizer cannot run on a server.
    """

    def __init__(self, optimizer: Optimizer, servers: Servers, *, bucket_bytes: int = 4 * 2**20) -> None:
        kind = type(optimizer)
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            where = "the script" if kind.__module__ == "__main__" else "a function"
            raise ValueError(
                f"a parameter server cannot import {kind.__qualname__}, which is defined in {where}: move it to a "
                "module beside the script"
            )
        self.version = 0
        self.pushes_early = False
        self._optimizer, self._servers, self._split = optimizer, servers, split_of(optimizer)
        self._bucket_bytes = bucket_bytes
        self._parts: list[_Part] = []
        self._pieces: dict[Parameter, list[tuple[_Part, int]]] = {}
        self._groups: list[list[int]] = []
        self._num_plans = 0
        self._pushing: list[Future[None]] = []
        self._hooks: list[Any] = []
        self._copying: torch.cuda.Stream | None = None
        self._number = next(servers.numbers_of_optimizers)

    def view(self) -> StateElsewhere:
        return StateElsewhere(type(self._optimizer).__name__)

    def close(self) -> None:
        """Pushes nothing from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._parts, self._pieces = [], [], {}

    def weights_bytes(self) -> list[int]:
        """The bytes of weights that each server has."""
        found = [0] * self._servers.job.num_servers
        for part in self._parts:
            found[part.server] += part.nbytes
        return found

    @property
    def _asked(self) -> list[int]:
        """The servers that have a part."""
        return sorted({part.server for part in self._parts})

    # Where things are

    def _parameters(self) -> list[Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _values(self) -> list[dict[str, Any]]:
        """The values of each group."""
        groups = self._optimizer.param_groups
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    def place(self, new: list[Parameter], given: Mapping[Any, Any]) -> None:
        """Sends the servers new parameters, and groups that have changed.

        Raises:
            ValueError: workers are asynchronous, and get to know of them at different times.
        """
        groups = [[id(parameter) for parameter in group["params"]] for group in self._optimizer.param_groups]
        if not new and groups == self._groups:
            return
        if self._num_plans and not self._servers.job.is_synchronous:
            raise ValueError(
                "the optimizer has got other parameters while training runs, on each rank at another time with "
                "mode='async': give it all of them from the beginning, frozen if need be (requires_grad=False), or use "
                "strategy='sync_ps'"
            )
        self._groups = groups
        first = len(self._parts)
        for parameters in alike(p for p in new if p.is_floating_point() or p.is_complex()):
            self._make_parts(parameters)  # type: ignore[arg-type]
        self._tell_plans(self._parts[first:], {p: state for p in new if (state := given.get(p))})
        if not self._servers.job.is_synchronous:
            self.pull()

    def _make_parts(self, parameters: list[Parameter]) -> None:
        """Cuts parameters of one dtype and device into parts that travel together."""
        buckets = bucket_parts(
            [parameter.numel() for parameter in parameters],
            self._servers.job.num_servers,
            self._split,
            full_numel=self._bucket_bytes / parameters[0].dtype.itemsize,
        )
        for server, pieces in buckets:
            number = next(self._servers.numbers_of_parts)
            part = _Part(number, server, [(parameters[piece.number], piece) for piece in pieces])
            self._parts.append(part)
            for index, (parameter, _) in enumerate(part.pieces):
                self._pieces.setdefault(parameter, []).append((part, index))
        for parameter in parameters:
            self._pieces.setdefault(parameter, []).sort(key=lambda found: found[0].pieces[found[1]][1].start)
            self._hooks.append(call_on_gradient(parameter, partial(self._gradient_is_ready, self._pieces[parameter])))

    def _tell_plans(self, new: list[_Part], given: Mapping[Any, Any]) -> None:
        """Tells the servers of new parameters with their states, and gets the memory for them."""
        states, is_first, answers = self._states_by_server(given), self._servers.worker == 0, {}
        for server in self._asked:
            parts = [part for part in new if part.server == server]
            shapes = [(part.number, part.dtype, [elements(*of).shape for of in part.pieces]) for part in parts]
            pieces = [
                [found for p in group["params"] for found in self._pieces.get(p, [])]
                for group in self._optimizer.param_groups
            ]
            groups = [[(part.number, index) for part, index in of if part.server == server] for of in pieces]
            plan = Plan(type(self._optimizer), self._split, shapes, groups)
            if is_first:
                weights, defaults = [part.joined() for part in parts], dict(self._optimizer.defaults)
                plan = replace(plan, weights=weights, defaults=defaults, values=self._values(), states=states[server])
            answers[server] = parts, self._servers.ask(server, "place", self._number, self._num_plans, plan)
        self._num_plans += 1
        for server, (parts, answer) in answers.items():
            flats = [torch.empty(part.numel, dtype=part.dtype) for part in parts]
            pushed, pulled = [torch.empty_like(flat) for flat in flats], flats
            if (offers := answer()) is not None:
                pushed, pulled = ([*cut(mapped(offer), flats)] for offer in offers)
            for part, out, into in zip(parts, pushed, pulled, strict=True):
                part.take_room(Room(self._servers.pairs[server], part.number, out, into))
                if is_first:
                    part.note_weights(is_in_room=self._sees_weights(part))

    def _changed(self) -> list[_Part]:
        """On worker 0 the parts whose weights have changed since they came; elsewhere none."""
        parts = self._parts if self._servers.worker == 0 else []
        return [part for part in parts if part.has_changed()]

    def _sees_weights(self, part: _Part) -> bool:
        """Whether the room has the weights of the server themselves."""
        return self._servers.job.is_synchronous and part.room.pair.shares_memory

    # Push

    def _gradient_is_ready(self, pieces: list[tuple[_Part, int]], parameter: Parameter) -> None:
        """Pushes a part when backward has the last of its gradients."""
        for part, _ in pieces if self.pushes_early and parameter.grad is not None else ():
            if part.lacking is None:
                part.lacking = {id(p) for p, _ in part.pieces if p.requires_grad}
            part.lacking.discard(id(parameter))
            if part.pushed is None and not part.lacking:
                self._push(part)

    def _push(self, part: _Part) -> None:
        part.pushed = part.gradients()
        part.num_pushes += 1
        (gradients, event), room = self._on_host(part, part.pushed[0]), part.room
        transfer = self._servers.meter.begin(
            "push",
            group="servers",
            group_size=self._servers.job.num_workers,
            size_bytes=part.nbytes,
            memory_bytes=part.nbytes if room.pair.shares_memory else 0,
            awaited=False,
        )

        @torch.no_grad()
        def push() -> None:
            try:
                if event is not None:
                    event.synchronize()
                torch._foreach_copy_(part.out, gradients)
                room.send()
            finally:
                transfer.finish()

        self._pushing.append(room.pair.background.submit(push))

    def _on_host(self, part: _Part, gradients: list[Tensor | None]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """The gradients of a part, dense and in host memory, and the event after which they are there.

        One zero where this worker has none. On a CPU they are the gradients themselves.
        """
        found = [
            _ZERO if gradient is None else elements(as_dense(gradient, self._optimizer), piece)
            for gradient, (_, piece) in zip(gradients, part.pieces, strict=True)
        ]
        if part.device.type != "cuda":
            return found if part.device.type == "cpu" else [gradient.cpu() for gradient in found], None
        if self._copying is None:
            self._copying = torch.cuda.Stream(part.device)  # type: ignore[no-untyped-call]
        self._copying.wait_stream(torch.cuda.current_stream(part.device))
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        rooms = [torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True) for gradient in found]
        with torch.cuda.stream(self._copying):
            for room, gradient in zip(rooms, found, strict=True):
                room.copy_(gradient, non_blocking=True)
                if gradient.is_cuda:
                    gradient.record_stream(self._copying)
            event.record(self._copying)
        return rooms, event

    # Step, and pull

    def step(self, update: Update) -> None:
        """Push gradients, have the servers step, pull all weights."""
        servers, is_first, is_synchronous = self._servers, self._servers.worker == 0, self._servers.job.is_synchronous
        if update.options:
            raise TypeError(f"a step on servers takes a closure only, not {', '.join(update.options)}")
        changed = self._changed()
        if changed and not is_synchronous:
            raise ValueError(
                "a hook has changed weights in place, and other workers have made updates to them meanwhile, which "
                "would be lost: use strategy='sync_ps' with that hook"
            )
        self._replace(changed)
        # Frozen parameters are neither pushed nor pulled.
        parts = [part for part in self._parts if any(p.requires_grad or p.grad is not None for p, _ in part.pieces)]
        for part in parts if is_first or not update.is_whole else ():
            if part.is_stale():  # backward has not pushed it, or it has changed
                self._push(part)
        start_s, size_bytes = servers.meter.now(), sum(part.nbytes for part in parts)
        with servers.meter.begin("pull", group="servers", group_size=servers.job.num_workers, size_bytes=size_bytes):
            norms = update.clip_norm is not None and servers.job.num_servers > 1 and (is_first or not is_synchronous)
            values, answers = self._values() if is_first else [], {}
            for server in self._asked:
                own = [part for part in parts if part.server == server]
                pushed = {part.number: (part.num_pushes, [p.grad is not None for p, _ in part.pieces]) for part in own}
                answers[server] = servers.ask(server, "step", self._number, Request(update, pushed, values))
            for future in self._pushing:
                future.result()
            if norms:
                total = sum(servers.pairs[server].receive() for server in self._asked)
                for server in self._asked:
                    servers.pairs[server].send(total)
            self._take_weights(parts, answers)
        servers.meter.waited(start_s, servers.meter.now())
        self._pushing.clear()
        for part in parts:
            part.pushed, part.num_pushes, part.lacking = None, 0, None
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # as its own step would tell LR schedulers

    def _take_weights(self, parts: Iterable[_Part], answers: Mapping[int, Callable[[], int]]) -> None:
        """Takes weights as they come, and their version, with which servers answer."""
        for part in parts:
            part.room.take()
            part.fill()
            if self._servers.worker == 0:  # while others are on their way
                part.note_weights(is_in_room=True)
        self.version = max([self.version, *[answer() for answer in answers.values()]])

    @torch.no_grad()
    def pull(self) -> None:
        """Gets the newest weights."""
        self._take_weights(self._parts, {s: self._servers.ask(s, "pull", self._number) for s in self._asked})

    def send_changed_weights(self) -> bool:
        """On worker 0 of asynchronous workers: sends the weights that have changed since they came.

        Returns:
            Whether there were any: a hook or a checkpoint has changed them.
        """
        changed = self._changed()
        self._replace(changed)
        return bool(changed)

    def _replace(self, changed: Iterable[_Part]) -> None:
        """Sends weights that a hook has changed."""
        for part in changed:
            self._servers.tell(part.server, "replace", self._number, part.number, part.joined())
            part.note_weights(is_in_room=self._sees_weights(part))

    # States

    def states(self) -> dict[int, Any]:
        """On worker 0 the states of the servers; elsewhere none."""
        if self._servers.worker != 0:
            return {}
        asked = {server: self._servers.ask(server, "state", self._number) for server in self._asked}
        told = {server: answer() for server, answer in asked.items()}
        found: dict[int, Any] = {}
        for number, parameter in enumerate(self._parameters()):
            states = [told[part.server].get((part.number, index)) for part, index in self._pieces.get(parameter, [])]
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
        if self._servers.worker == 0:
            values, states = self._values(), self._states_by_server(state_of)
            for answer in [self._servers.ask(s, "load", self._number, values, states[s]) for s in self._asked]:
                answer()

    def _states_by_server(self, state_of: Mapping[Any, Any]) -> list[dict[tuple[int, int], dict[str, Any]]]:
        found: list[dict[tuple[int, int], dict[str, Any]]] = [{} for _ in range(self._servers.job.num_servers)]
        for parameter, state in state_of.items():
            for part, index in self._pieces.get(parameter, []) if state else ():
                # Copies: pickle would keep one counter of steps for all pieces of a tensor.
                of_piece = part_of_state(state, parameter, part.pieces[index][1])
                found[part.server][part.number, index] = tree_map_only(Tensor, Tensor.cpu, of_piece)
        return found
