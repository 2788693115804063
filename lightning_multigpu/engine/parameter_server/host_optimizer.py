"""An optimizer whose update the host makes, in shards: one for each rank's process, so that all cores take part.

A rank's gradients go to host memory that the ranks share, and each rank has one part of the update::

    rank 0   .grad --push--> [ g0 | g0' ]         [ w | - ] --+--pull--> weights
                                \\   /    optimizer   ^         |
    host     memory         sum of the part  ------ '         |
                                /   \\                          |
    rank 1   .grad --push--> [ g1 | g1' ]         [ - | w'] --+--pull--> weights

The user's optimizer object stays what schedulers and callbacks know: its groups hold the module's parameters, and the
host's update takes the learning rate and every other value of the groups as they are at that moment. Within the update
the groups hold this rank's shard in their place, with the shard's gradients, on the CPU.

Sources: M. Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014, for push and pull;
J. Ren et al., "ZeRO-Offload", USENIX ATC 2021, for the update on the host in one shard a process.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.shared_memory.host_all_reduce import SharedMemoryAllReduce
from lightning_multigpu.communication.tensors import alike
from lightning_multigpu.engine.redirected_optimizer import (
    RedirectedOptimizer,
    call_on_gradient,
    part_of,
)
from lightning_multigpu.placement.gradient_kinds import ABSENT, DENSE, SPARSE, kind_of, rows_of, sparse
from lightning_multigpu.placement.norms import scale_to_norm, sum_of_squares
from lightning_multigpu.placement.optimizer_split import Split
from lightning_multigpu.placement.table import Layout, Piece, imbalance_of


@dataclass(frozen=True)
class HostMemory:
    """The memory that the ranks of a host share, and what they need to use it.

    Attributes:
        ranks: exchanges what is in it.
        meter: told of every push and pull.
        reserve: makes a flat tensor of the host's memory, equally long on every rank; a collective.
        gather: collects an object of every rank, in the order of ranks; a collective.
    """

    ranks: SharedMemoryAllReduce
    meter: Meter
    reserve: Callable[[int, torch.dtype], Tensor]
    gather: Callable[[Any], list[Any]]

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def num_ranks(self) -> int:
        return self.ranks.world_size


@dataclass(frozen=True)
class _Flat:
    """Parameters of one dtype, with room on the host for their gradients and for new weights."""

    parameters: list[Parameter]
    layout: Layout
    gradients: Tensor
    weights: Tensor
    pieces: list[Piece]
    present: list[int] = field(default_factory=list)
    rows: dict[int, Tensor] = field(default_factory=dict)

    def gradient(self, number: int) -> Tensor:
        """The place of a parameter's gradient, in the parameter's shape."""
        return self._view(self.gradients, number)

    def weight(self, number: int) -> Tensor:
        return self._view(self.weights, number)

    def own(self, flat: Tensor, piece: Piece) -> Tensor:
        """The elements of a piece, in the parameter's shape if they are all of it."""
        elements = flat[piece.offset : piece.end]
        return elements.view(self.parameters[piece.number].shape) if self._is_whole(piece) else elements

    def of_parameter(self, tensor: Tensor, piece: Piece) -> Tensor:
        """The same elements of a tensor that has the parameter's shape."""
        return tensor if self._is_whole(piece) else tensor.reshape(-1)[piece.start : piece.stop]

    def _is_whole(self, piece: Piece) -> bool:
        return piece.stop - piece.start == self.layout.numels[piece.number]

    def _view(self, flat: Tensor, number: int) -> Tensor:
        offset = self.layout.offsets[number]
        return flat[offset : offset + self.layout.numels[number]].view(self.parameters[number].shape)


class HostOptimizer(RedirectedOptimizer):
    """One optimizer of the user's, stepped in shards on the host by all ranks together.

    Making one, stepping, saving and loading are collectives of the ranks.

    Args:
        optimizer: of a module that is the same on all ranks.
        memory: that the ranks share.
        split: what may be divided; by default, what the class of the optimizer allows.
    """

    def __init__(self, optimizer: Optimizer, memory: HostMemory, *, split: Split | None = None) -> None:
        super().__init__(optimizer, split)
        self._memory = memory
        self._flats: list[_Flat] = []
        self._shards: dict[Parameter, Parameter | None] = {}
        self._shard_state: Any = defaultdict(dict)
        self._num_changed = 0
        self._copies = EarlyCopies()

    @property
    def imbalance(self) -> float:
        """The largest shard in proportion to an even one; 1.0 is even."""
        self._place_new()
        sizes = [0] * self._memory.num_ranks
        for flat in self._flats:
            for rank, (first, last) in enumerate(flat.layout.bounds):
                sizes[rank] += (last - first) * flat.weights.element_size()
        return imbalance_of(sizes)

    def close(self) -> None:
        """Gives the optimizer its own ``step`` back, and this rank's state of its shard up."""
        super().close()
        self._flats, self._shards = [], {}
        self._shard_state.clear()
        self._copies.close()

    def average_gradients(self) -> None:
        self._place_new()
        for flat in self._present(averages=True):
            with self._metered("push", flat):
                self._push(flat)
                self._memory.ranks(flat.gradients, average=True)
            with self._metered("pull", flat):
                for number, parameter in enumerate(flat.parameters):
                    kind = flat.present[number]
                    if kind == ABSENT:
                        continue
                    average = flat.gradient(number)
                    if kind == SPARSE:
                        parameter.grad = sparse(average.to(parameter.device, copy=True), flat.rows[number])
                    elif parameter.grad is None or parameter.grad.is_sparse:
                        parameter.grad = average.to(parameter.device, copy=True)
                    else:
                        parameter.grad.copy_(average)
        self.gradients_are_whole = True

    def _step(self, **options: Any) -> None:
        """Push gradients, update this rank's shard, pull all weights."""
        flats = self._present(averages=False)
        for flat in flats:
            if self.gradients_are_whole:
                self._take_own(flat)
            else:
                with self._metered("push", flat):
                    self._push(flat)
                    self._memory.ranks.reduce_scatter(flat.gradients, average=True, bounds=flat.layout.bounds)
        self._clip(flats)
        self._load_shard(flats)
        with self._holding_shard(), self._capturing_nothing():
            self._update(**options)
        for flat in flats:
            with self._metered("pull", flat):
                self._memory.ranks.all_gather(flat.weights, bounds=flat.layout.bounds)
                for number, parameter in enumerate(flat.parameters):
                    parameter.copy_(flat.weight(number), non_blocking=True)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The state as the whole optimizer would have it on one device; a collective.

        Returns:
            On rank 0 the values of all tensors, in host memory; on other ranks the groups alone.
        """
        self._place_new()
        self._take_state()
        found = self.groups_alone()
        own = {number: state for number, (_, _, shard) in enumerate(self._numbered())
               if shard is not None and (state := self._shard_state.get(shard))}  # fmt: skip
        told = self._memory.gather(
            {number: {name: _told(value) for name, value in state.items()} for number, state in own.items()}
        )
        for number, (parameter, pieces, _) in enumerate(self._numbered()):
            holders = [rank for rank, states in enumerate(told) if number in states]
            if not holders:
                continue
            whole = {}
            for name, value in told[holders[0]][number].items():
                if isinstance(value, _Shape):
                    value = self._gathered(own.get(number, {}).get(name), value, parameter, pieces, holders)
                whole[name] = value
            if self._memory.rank == 0:
                found["state"][number] = whole
        return found

    def _load(self, saved_groups: list[dict[str, Any]], saved_state: Mapping[int, Any]) -> None:
        saved = [number for group in saved_groups for number in group["params"]]
        places = dict(zip(saved, self._numbered(), strict=True))
        state = {}
        for number, values in saved_state.items():
            parameter, pieces, shard = places[number]
            if shard is not None:
                piece = pieces[self._memory.rank]
                state[number] = _part_of_state(values, parameter, piece)
        groups = [
            {**group, "params": [number for number in group["params"] if places[number][2] is not None]}
            for group in saved_groups
        ]
        with self._holding_shard():
            self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _change_state(self, changes: Mapping[Parameter, Mapping[str, Any]]) -> None:
        self._num_changed += len(changes)
        pieces = {flat.parameters[piece.number]: piece for flat in self._flats for piece in flat.pieces}
        for parameter, state in changes.items():
            if (shard := self._shards[parameter]) is not None:
                self._shard_state.pop(shard, None)
                if state:
                    self._shard_state[shard] = _part_of_state(state, parameter, pieces[parameter])

    def _numbered(self) -> Iterator[tuple[Parameter, dict[int, Piece], Parameter | None]]:
        """The parameters in the order of a checkpoint: each with its pieces by rank, and this rank's shard."""
        pieces: dict[Parameter, dict[int, Piece]] = {}
        for flat in self._flats:
            for rank in range(self._memory.num_ranks):
                for piece in flat.layout.pieces(rank):
                    pieces.setdefault(flat.parameters[piece.number], {})[rank] = piece
        for parameter in self._parameters():
            yield parameter, pieces.get(parameter, {}), self._shards[parameter]

    def _gathered(
        self, own: Tensor | None, like: _Shape, parameter: Parameter, pieces: Mapping[int, Piece], holders: list[int]
    ) -> Tensor:
        """A tensor of the state, from the ranks that have it; a collective."""
        if len(holders) == 1:
            shape, ends = like.shape, {holders[0]: (0, math.prod(like.shape))}
        else:
            shape, ends = parameter.shape, {rank: (pieces[rank].start, pieces[rank].stop) for rank in holders}
        whole = torch.empty(math.prod(shape), dtype=like.dtype)
        bounds, last = [], 0
        for rank in range(self._memory.num_ranks):
            bounds.append(ends.get(rank, (last, last)))
            last = bounds[-1][1]
        if own is not None:
            first, last = bounds[self._memory.rank]
            whole[first:last] = own.reshape(-1)
        if self._memory.num_ranks > 1:
            self._memory.ranks.all_gather(whole, bounds=bounds)
        return whole.view(shape)

    # Where things are

    def _place_new(self) -> None:
        """Reserves memory on the host for parameters that the optimizer has got since; a collective."""
        new = [parameter for parameter in self._parameters() if parameter not in self._shards]
        for parameters in alike(new):
            numels = [parameter.numel() for parameter in parameters]
            layout = Layout(numels, self._memory.num_ranks, self._split)
            dtype = parameters[0].dtype
            gradients, weights = (self._memory.reserve(layout.total, dtype) for _ in range(2))
            pieces = layout.pieces(self._memory.rank)
            flat = _Flat(parameters, layout, gradients, weights, pieces)  # type: ignore[arg-type]
            self._flats.append(flat)
            self._shards.update(dict.fromkeys(flat.parameters))
            for piece in pieces:
                shard = Parameter(flat.own(weights, piece), requires_grad=False)
                self._shards[flat.parameters[piece.number]] = shard
                parameter = flat.parameters[piece.number]
                state = self._given_states().get(parameter, {})  # some optimizers begin with one
                self._shard_state[shard] = _part_of_state(state, parameter, piece)
            for number, parameter in enumerate(flat.parameters):
                if self._watched is None:
                    self.optimizer.state.pop(parameter, None)
                if parameter.is_cuda:
                    self._copies.follow(parameter, flat.gradient(number), lambda: self.pushes_early)

    def _present(self, *, averages: bool) -> list[_Flat]:
        """The flats that have a gradient on some rank; notes which of their parameters have one, and sparse rows."""
        kinds = torch.tensor([kind_of(parameter.grad) for flat in self._flats for parameter in flat.parameters])
        own = torch.tensor([averages, self._num_changed])
        counts = torch.cat([kinds == DENSE, kinds == SPARSE, own]).to(torch.int32)
        if self._memory.num_ranks > 1:
            self._memory.ranks(counts)
        *counted, num_averaging, num_changed = counts.tolist()
        if num_averaging not in (0, self._memory.num_ranks):
            raise ValueError(
                f"{num_averaging} of {self._memory.num_ranks} ranks have hooks that read gradients before a step of "
                f"{type(self.optimizer).__name__}: register such hooks on all ranks"
            )
        if num_changed != self._num_changed * self._memory.num_ranks:
            raise ValueError(
                f"this rank has changed {self._num_changed} states in optimizer.state of "
                f"{type(self.optimizer).__name__}, and all ranks together {num_changed}: make the change on all ranks"
            )
        self._num_changed = 0
        found = iter(zip(counted[: len(kinds)], counted[len(kinds) :], strict=True))
        for flat in self._flats:
            flat.present[:] = [DENSE if dense else SPARSE if is_sparse else ABSENT
                               for dense, is_sparse in (next(found) for _ in flat.parameters)]  # fmt: skip
            flat.rows.clear()
            for number in [number for number, kind in enumerate(flat.present) if kind == SPARSE]:
                parameter = flat.parameters[number]
                rows = torch.zeros(len(parameter), dtype=torch.int32)
                if parameter.grad is not None:
                    rows += rows_of(parameter.grad)
                if self._memory.num_ranks > 1:
                    self._memory.ranks(rows)
                flat.rows[number] = rows > 0
        return [flat for flat in self._flats if any(flat.present)]

    # Push, update, pull

    def _push(self, flat: _Flat) -> None:
        """Copies this rank's gradients to the host; zeros where it has none and another rank has one."""
        for number, parameter in enumerate(flat.parameters):
            place, gradient = flat.gradient(number), parameter.grad
            if gradient is None:
                place.zero_()
            elif not self._copies.has(parameter):
                place.copy_(gradient.to_dense() if gradient.is_sparse else gradient, non_blocking=True)
        self._await_device(flat)

    def _take_own(self, flat: _Flat) -> None:
        """Copies this rank's shard of gradients that are the same on all ranks."""
        for piece in flat.pieces:
            gradient = flat.parameters[piece.number].grad
            if gradient is not None:
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                flat.own(flat.gradients, piece).copy_(flat.of_parameter(gradient, piece), non_blocking=True)
        self._await_device(flat)

    def _await_device(self, flat: _Flat) -> None:
        device = flat.parameters[0].device
        if device.type == "cuda":
            self._copies.wait()
            torch.cuda.current_stream(device).synchronize()

    def _clip(self, flats: Sequence[_Flat]) -> None:
        own = [flat.own(flat.gradients, piece) for flat in flats for piece in flat.pieces if flat.present[piece.number]]
        if self.clip_value is not None:
            for gradient in own:
                gradient.clamp_(-self.clip_value, self.clip_value)
        if self.clip_norm is not None:
            scale_to_norm(own, self.clip_norm, self._memory.ranks(sum_of_squares(own)))

    def _load_shard(self, flats: Sequence[_Flat]) -> None:
        """Gives this rank's shard the weights of now, which a hook may have changed, and its gradients."""
        for flat in flats:
            for piece in flat.pieces:
                parameter = flat.parameters[piece.number]
                shard = self._shards[parameter]
                assert shard is not None
                shard.copy_(flat.of_parameter(parameter, piece))
                kind, gradient = flat.present[piece.number], flat.own(flat.gradients, piece)
                is_sparse = kind == SPARSE and self._split != "elements"
                shard.grad = (
                    None if kind == ABSENT else sparse(gradient, flat.rows[piece.number]) if is_sparse else gradient
                )

    @contextmanager
    def _holding_shard(self) -> Iterator[None]:
        """Within the block the optimizer's groups hold this rank's shard, and the shard's state."""
        optimizer = self.optimizer
        held = [group["params"] for group in optimizer.param_groups]
        outside, optimizer.state = optimizer.state, self._shard_state
        for group in optimizer.param_groups:
            group["params"] = [shard for p in group["params"] if (shard := self._shards[p]) is not None]
        try:
            yield
        finally:
            self._shard_state, optimizer.state = optimizer.state, outside
            for group, parameters in zip(optimizer.param_groups, held, strict=True):  # loading makes new groups
                group["params"] = parameters
            for shard in self._shards.values():
                if shard is not None:
                    shard.grad = None

    @contextmanager
    def _capturing_nothing(self) -> Iterator[None]:
        """Within the block no group is ``capturable``, which torch refuses for an update on the CPU."""
        capturable = [group for group in self.optimizer.param_groups if group.get("capturable")]
        for group in capturable:
            group["capturable"] = False
        try:
            yield
        finally:
            for group in capturable:
                group["capturable"] = True

    def _metered(self, operation: str, flat: _Flat) -> Any:
        size_bytes = flat.gradients.nbytes
        return self._memory.meter.blocking(
            operation,
            group="host",
            group_size=self._memory.num_ranks,
            size_bytes=size_bytes,
            memory_bytes=size_bytes if operation == "push" else 0,
        )


class EarlyCopies:
    """Copies of gradients from a GPU to the host, on a stream of their own, while backward goes on::

    compute stream    backward ... [g2] ....... [g1] ....... [g0]
    copy stream                        [- g2 -]     [- g1 -]     [- g0 -]
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._done: dict[Parameter, tuple[Tensor, int]] = {}
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
            self._done[parameter] = gradient, gradient._version

        self._hooks.append(call_on_gradient(parameter, copy))

    def has(self, parameter: Parameter) -> bool:
        """Whether the parameter's present gradient was copied; the first call alone says so."""
        gradient, version = self._done.pop(parameter, (None, 0))
        return gradient is not None and gradient is parameter.grad and gradient._version == version

    def wait(self) -> None:
        """Returns when all copies have ended."""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Copies nothing from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._done, self._stream = [], {}, None


@dataclass(frozen=True)
class _Shape:
    """Shape and dtype of a tensor of a rank's shard of the state."""

    shape: torch.Size
    dtype: torch.dtype


def _part_of_state(state: Mapping[str, Any], parameter: Tensor, piece: Piece) -> dict[str, Any]:
    return {name: part_of(value, parameter, piece.start, piece.stop) for name, value in state.items()}


def _told(value: Any) -> Any:
    return _Shape(value.shape, value.dtype) if isinstance(value, Tensor) and value.dim() > 0 else value
