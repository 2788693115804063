"""The host's memory as the transport of an optimizer's step: one part for each rank's process, so that all cores work.

A rank's gradients go to host memory that the ranks share, and each rank has one part of the update::

    rank 0   .grad --push--> [ g0 | g0' ]         [ w | - ] --+--pull--> weights
                                \\   /    optimizer   ^         |
    host     memory         sum of the part  ------ '         |
                                /   \\                          |
    rank 1   .grad --push--> [ g1 | g1' ]         [ - | w'] --+--pull--> weights

Sources: M. Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014, for push and pull;
J. Ren et al., "ZeRO-Offload", USENIX ATC 2021, for the update on the host in one shard a process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.shared_memory.host_all_reduce import SharedMemoryAllReduce
from lightning_multigpu.communication.tensors import alike, marks_of
from lightning_multigpu.engine.optimizer_state import StateElsewhere
from lightning_multigpu.placement.owned_part import OwnedPart, clip
from lightning_multigpu.placement.owned_step import Update, call_on_gradient
from lightning_multigpu.placement.table import Layout, as_dense, elements, joined_state, placed, split_of


class _Flat:
    """Parameters of one dtype, with room on the host for their gradients and for new weights.

    Attributes:
        pieces: what is in this rank's part; each has its gradient in ``own_gradients``.
        gradient_of, weight_of: the places of each parameter, in its shape.
        present: which parameters have a gradient on some rank.
    """

    def __init__(
        self, parameters: list[Parameter], layout: Layout, rank: int, reserve: Callable[[int, torch.dtype], Tensor]
    ) -> None:
        self.parameters, self.layout, self.pieces = parameters, layout, layout.pieces(rank)
        self.gradients, self.weights = (reserve(layout.total, parameters[0].dtype) for _ in range(2))
        self.gradient_of, self.weight_of = (
            [placed(flat, layout.whole(number), parameter) for number, parameter in enumerate(parameters)]
            for flat in (self.gradients, self.weights)
        )
        self.own_gradients = [placed(self.gradients, piece, parameters[piece.number]) for piece in self.pieces]
        self.present: list[bool] = []


class HostTransport:
    """The :class:`~lightning_multigpu.placement.owned_step.Transport` of ranks that share the host's memory.

    Args:
        optimizer: of a module that is the same on all ranks.
        ranks: of the host; they exchange what is in memory that they share.
        reserve: makes a flat tensor of the host's memory, equally long on every rank; a collective.
        gather: collects an object of every rank, in the order of ranks; a collective.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        ranks: SharedMemoryAllReduce,
        meter: Meter,
        *,
        reserve: Callable[[int, torch.dtype], Tensor],
        gather: Callable[[Any], list[Any]],
    ) -> None:
        self.part = OwnedPart(optimizer)
        self.load, self.change = self.part.load_whole, self.part.take_states
        self.pushes_early = False
        self._optimizer, self._split = optimizer, split_of(optimizer)
        self._ranks, self._meter, self._reserve, self._gather = ranks, meter, reserve, gather
        self._flats: list[_Flat] = []
        self._copies = EarlyCopies()

    def view(self) -> StateElsewhere:
        return StateElsewhere(type(self._optimizer).__name__)

    def close(self) -> None:
        """Copies nothing from now on, and gives this rank's part up."""
        self._flats = []
        self.part.clear()
        self._copies.close()

    def place(self, new: list[Parameter], given: Mapping[Any, Any]) -> None:
        """Reserves memory on the host for new parameters."""
        for parameters in alike(new):
            layout = Layout([parameter.numel() for parameter in parameters], self._ranks.world_size, self._split)
            flat = _Flat(parameters, layout, self._ranks.rank, self._reserve)  # type: ignore[arg-type]
            self._flats.append(flat)
            for piece in flat.pieces:
                parameter = flat.parameters[piece.number]
                weights = Parameter(placed(flat.weights, piece, parameter), requires_grad=False)
                self.part.pieces[parameter] = weights, piece
                self.part.take_state(parameter, given.get(parameter, {}))  # some optimizers begin with one
            for parameter, place in zip(flat.parameters, flat.gradient_of, strict=True):
                if parameter.is_cuda:
                    self._copies.follow(parameter, place, lambda: self.pushes_early)

    def step(self, update: Update) -> None:
        """Push gradients, update this rank's part, pull all weights."""
        flats = self._present(update)
        for flat in flats:
            if update.is_whole:
                self._take_own(flat)
            else:
                with self._metered("push", flat):
                    self._push(flat)
                    self._ranks.reduce_scatter(flat.gradients, average=True, bounds=flat.layout.bounds)
        gradients: dict[Parameter, Tensor] = {}
        for flat in flats:
            for piece, gradient in zip(flat.pieces, flat.own_gradients, strict=True):
                if flat.present[piece.number]:
                    gradients[self.part.pieces[flat.parameters[piece.number]][0]] = gradient
        clip(gradients.values(), update.clip_value, update.clip_norm, self._ranks)
        self.part.read(parameter for flat in flats for parameter in flat.parameters)
        self.part.update(self.part.held(), gradients, **update.options)
        for flat in flats:
            with self._metered("pull", flat):
                self._ranks.all_gather(flat.weights, bounds=flat.layout.bounds)
                torch._foreach_copy_(flat.parameters, flat.weight_of, non_blocking=True)  # type: ignore[arg-type]

    def _present(self, update: Update) -> list[_Flat]:
        """The flats that have a gradient on some rank; notes which of their parameters have one."""
        has = [parameter.grad is not None for flat in self._flats for parameter in flat.parameters]
        num_changed, name = update.num_changed, type(self._optimizer).__name__
        told = torch.tensor([*has, num_changed, num_changed**2], dtype=torch.int32)
        *counted, all_changed, squares = self._ranks(told).tolist()
        if all_changed**2 != self._ranks.world_size * squares:  # equal only if all ranks have changed as many
            raise ValueError(
                f"this rank has changed {num_changed} states in optimizer.state of {name}, and all ranks together "
                f"{all_changed}: make the change on all ranks"
            )
        found = iter(counted)
        for flat in self._flats:
            flat.present[:] = [next(found) > 0 for _ in flat.parameters]
        return [flat for flat in self._flats if any(flat.present)]

    # Push

    def _push(self, flat: _Flat) -> None:
        """Copies this rank's gradients to the host; zeros where it has none and another rank has one."""
        places, gradients = [], []
        for parameter, place in zip(flat.parameters, flat.gradient_of, strict=True):
            if parameter.grad is None:
                place.zero_()
            elif not self._copies.has(parameter):
                places.append(place)
                gradients.append(as_dense(parameter.grad, self._optimizer))
        if places:
            torch._foreach_copy_(places, gradients, non_blocking=True)
        self._await_device(flat)

    def _take_own(self, flat: _Flat) -> None:
        """Copies this rank's part of gradients that are the same on all ranks."""
        for piece, place in zip(flat.pieces, flat.own_gradients, strict=True):
            gradient = flat.parameters[piece.number].grad
            if gradient is not None:
                place.copy_(elements(as_dense(gradient, self._optimizer), piece), non_blocking=True)
        self._await_device(flat)

    def _await_device(self, flat: _Flat) -> None:
        device = flat.parameters[0].device
        if device.type == "cuda":
            self._copies.wait()
            torch.cuda.current_stream(device).synchronize()

    def _metered(self, operation: str, flat: _Flat) -> Any:
        size_bytes = flat.gradients.nbytes
        return self._meter.blocking(
            operation,
            group="host",
            group_size=self._ranks.world_size,
            size_bytes=size_bytes,
            memory_bytes=size_bytes if operation == "push" else 0,
        )

    # States

    def states(self) -> dict[int, Any]:
        """On rank 0 the states, in host memory; elsewhere none."""
        own, found = self.part.numbered_states(), {}
        parameters = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        for number, parameter in enumerate(parameters):
            present = [state for state in self._gather(own.get(number)) if state is not None]
            if present and self._ranks.rank == 0:
                found[number] = joined_state(present, parameter)
        return found


class EarlyCopies:
    """Copies of gradients from a GPU to the host, on a stream of their own, while backward goes on::

    compute stream    backward ... [g2] ....... [g1] ....... [g0]
    copy stream                        [- g2 -]     [- g1 -]     [- g0 -]
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._done: dict[Parameter, tuple[Tensor, list[tuple[int, int]]]] = {}
        self._hooks: list[Any] = []

    def follow(self, parameter: Parameter, place: Tensor, is_wanted: Callable[[], bool]) -> None:
        """Copies each gradient of the parameter to ``place``, which has its shape, when backward has it."""

        def copy(of: Tensor) -> None:
            gradient = of.grad
            if not is_wanted() or gradient is None or gradient.is_sparse:
                return
            if self._stream is None:
                self._stream = torch.cuda.Stream(parameter.device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(parameter.device))
            with torch.cuda.stream(self._stream):
                place.copy_(gradient, non_blocking=True)
            gradient.record_stream(self._stream)
            self._done[parameter] = gradient, marks_of([gradient])

        self._hooks.append(call_on_gradient(parameter, copy))

    def has(self, parameter: Parameter) -> bool:
        """Whether the parameter's present gradient was copied; the first call alone says so."""
        gradient, marks = self._done.pop(parameter, (None, []))
        return gradient is not None and gradient is parameter.grad and marks_of([gradient]) == marks

    def wait(self) -> None:
        """Returns when all copies have ended."""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Copies nothing from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._done, self._stream = [], {}, None
