"""FairScale's OSS as the transport of an optimizer's step: whole parameters belong to ranks.

Every parameter belongs to one rank as a whole. That rank has the averaged gradient and the optimizer's state, updates
the parameter, and sends the new value to all ranks::

    rank 0   gradients of p0, p2 --> your optimizer, holding p0 and p2 --> p0, p2 --broadcast--> p0 p1 p2
    rank 1   gradient of p1 -------> your optimizer, holding p1 ---------> p1 ------broadcast--> p0 p1 p2

The user's optimizer object makes the update, with this rank's parameters in its groups, so that any class works with
all its options, also one whose constructor does not take its own ``defaults`` (AdamW).

FairScale 0.4.13 fails on torch 2.13 in these cases, which :class:`_Shards` handles:

- A group that is added after layers were unfrozen gives all parameters new owners, which lack their states.
- Parameters of several dtypes fail an assertion.
- ``broadcast_fp16`` rounds the owner's weights in every step, so that small updates are lost, and makes float64
  parameters float32.

Sources: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020; OSS of
FairScale 0.4.13.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.misc import ParamBucket
from fairscale.optim import OSS
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.engine.optimizer_state import PartialState
from lightning_multigpu.placement.owned_part import OwnedPart
from lightning_multigpu.placement.owned_step import Update
from lightning_multigpu.placement.table import Piece


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block FairScale's deprecated calls give no warning, and its messages do not configure logging."""
    handler = logging.NullHandler()  # logging.info() would give a root logger without a handler one
    logging.getLogger().addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.getLogger().removeHandler(handler)


class ShardTransport:
    """The :class:`~lightning_multigpu.placement.owned_step.Transport` of sharded optimizers.

    Backward brings the averaged gradients to the owners, see :mod:`.sharded_gradients`. Making one is a collective.

    Args:
        optimizer: of a module that is the same on all ranks.
        group: the ranks; its meter records every broadcast.
        broadcast_dtype: the dtype in which new values travel; None for the parameters' own.
        offload: keep states in the host's memory, and update a copy of this rank's parameters there.
    """

    pushes_early = False

    def __init__(
        self,
        optimizer: Optimizer,
        group: MeteredGroup,
        *,
        broadcast_dtype: torch.dtype | None = None,
        offload: bool = False,
    ) -> None:
        self.part = OwnedPart(optimizer)
        self.load, self.change = self.part.load_whole, self.part.take_states
        self.shards = _Shards(optimizer, group)
        self._optimizer, self._group = optimizer, group
        self._broadcast_dtype, self._offload = broadcast_dtype, offload

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank updates the parameter."""
        return self.shards.owners.get(parameter) == self._group.rank

    def has(self, parameter: Tensor) -> bool:
        """Whether the parameter belongs to the optimizer."""
        return parameter in self.shards.owners

    def view(self) -> PartialState:
        return PartialState(self._optimizer, self._key, take=self._taken, own=self.part.states)

    def _key(self, parameter: Any) -> Any:
        """Under which key this rank has a parameter's state; None if another rank has it."""
        if parameter in self.part.pieces:
            return self.part.pieces[parameter][0]
        return None if self.has(parameter) else parameter

    def _taken(self, _: Any, state: Any) -> Any:
        return tree_map_only(Tensor, Tensor.cpu, state) if self._offload else state

    def close(self) -> None:
        """Does nothing: OSS has no hooks."""

    def share_values_of(self, parameters: Iterable[Tensor]) -> None:
        """Gives every rank the owners' values of these parameters, which may be frozen; a collective."""
        for parameter in parameters:
            source = self._group.ranks[self.shards.owners[parameter]]
            self._group.broadcast_tensors([parameter.detach()], src=source)

    def place(self, new: list[Parameter], given: Mapping[Any, Any]) -> None:
        self.shards.follow(self._optimizer)
        for parameter in filter(self.owns, new):
            value = parameter
            if self._offload:
                memory = torch.empty_like(parameter, device="cpu", pin_memory=parameter.is_cuda)
                value = Parameter(memory, requires_grad=False)
            self.part.pieces[parameter] = value, Piece(0, 0, parameter.numel(), 0)
            self.part.take_state(parameter, given.get(parameter, {}))  # some optimizers begin with one
        self.part.take_states({key: state for key, state in given.items() if not isinstance(key, Tensor)})

    def average(self, num_changed: int) -> bool:
        """Does nothing: backward has averaged the gradients of this rank's parameters."""
        return True

    def step(self, update: Update) -> None:
        """Updates this rank's parameters, and broadcasts their values."""
        part = self.part
        self.shards.take_assigned()
        part.read(part.pieces)
        pieces = {value: parameter.grad for parameter, (value, _) in part.pieces.items() if value is not parameter}
        gradients = {value: gradient.to("cpu") for value, gradient in pieces.items() if gradient is not None}
        part.update(part.held(), gradients, **update.options)
        part.write()
        self.shards.broadcast(self._broadcast_dtype)

    def states(self) -> dict[int, Any]:
        """The states of this rank's parameters."""
        of_all = {key: state for key, state in self.part.states.items() if not isinstance(key, Tensor)}
        return {**self.part.numbered_states(), **of_all}


class _Shards(OSS):  # type: ignore[misc]  # without annotations
    """OSS around an optimizer object instead of a class; the groups are the optimizer's own.

    Attributes:
        owners: the rank of each parameter, which never changes. As in OSS, a new parameter goes to the rank with the
            fewest elements; a frozen parameter counts as one element.
    """

    _partition_parameters: list[list[dict[str, Any]]]
    buckets: dict[Any, dict[int, Any]]

    def __init__(self, optimizer: Optimizer, group: MeteredGroup) -> None:
        self.owners: dict[Tensor, int] = {}
        self._flat: list[tuple[Any, ...]] = []
        self._metered_group = group
        with quiet():
            super().__init__(
                _filled(optimizer), optim=lambda groups: SimpleNamespace(param_groups=groups), group=group.group
            )

    def follow(self, optimizer: Optimizer) -> None:
        """Takes the optimizer's present groups, since loading replaces them, and finds owners for new parameters."""
        self.param_groups = self.optim.param_groups = _filled(optimizer)
        if any(p not in self.owners for group in self.param_groups for p in group["params"]):
            with quiet():
                self._clear_cache()
                self.refresh_trainable()

    def partition_parameters(self) -> list[list[dict[str, Any]]]:
        if not self._partition_parameters:
            sizes = [0] * self.world_size
            of_ranks: list[list[dict[str, Any]]] = [[] for _ in sizes]
            for group in self.param_groups:
                for each in of_ranks:
                    each.append({**group, "params": []})
                for parameter in group["params"]:
                    rank = self.owners.setdefault(parameter, sizes.index(min(sizes)))
                    sizes[rank] += parameter.numel() if parameter.requires_grad else 1
                    of_ranks[rank][-1]["params"].append(parameter)
            self._partition_parameters = of_ranks
        return self._partition_parameters

    def _setup_flat_buffers(self) -> None:
        """Makes the trained parameters of each rank and dtype views of one flat tensor."""
        trained: dict[Any, dict[int, list[Tensor]]] = {}
        for device, of_ranks in self._per_device_params.items():
            for rank, parameters in enumerate(of_ranks):
                for parameter in parameters:
                    if parameter.requires_grad:
                        trained.setdefault((device, parameter.dtype), {}).setdefault(rank, []).append(parameter)
        flat = [
            (kind, rank, *map(id, parameters))
            for kind, of_ranks in trained.items()
            for rank, parameters in of_ranks.items()
        ]
        if flat == self._flat:
            return
        self._flat = flat
        for parameter in self.owners:
            if not parameter.requires_grad:  # else it would keep the old flat tensor alive
                parameter.data = parameter.data.detach().clone()
        self.buckets = {}
        for (device, dtype), of_ranks in trained.items():
            self.buckets[device, dtype] = {}
            for rank, parameters in of_ranks.items():
                bucket = ParamBucket(sum(p.numel() for p in parameters), dtype, device)
                for parameter in parameters:
                    bucket.add_param(parameter)
                self.buckets[device, dtype][rank] = bucket

    def take_assigned(self) -> None:
        """Copies values that code has assigned to ``parameter.data`` into the flat tensors, of which it was a view."""
        for of_ranks in self.buckets.values():
            for bucket in of_ranks.values():
                start = 0
                for parameter in bucket._params:
                    view = bucket.buffer[start : start + parameter.numel()].view_as(parameter)
                    start += parameter.numel()
                    if parameter.data_ptr() != view.data_ptr():
                        view.copy_(parameter.detach())
                        parameter.data = view

    @torch.no_grad()
    def broadcast(self, dtype: torch.dtype | None) -> None:
        """Copies each rank's parameters to all ranks; ``dtype`` rounds them, except on their own rank."""
        under_way = []
        for of_ranks in self.buckets.values():
            for rank, bucket in of_ranks.items():
                rounds = dtype is not None and bucket.buffer.is_floating_point()
                values = bucket.buffer.to(dtype) if rounds else bucket.buffer
                sent_bytes = values.nbytes if rank == self.rank and self.world_size > 1 else 0
                transfer = self._metered_group.begin(
                    "broadcast", values.nbytes, sent_bytes=sent_bytes, blocking=True, on_stream=values.is_cuda
                )
                work = dist.broadcast(values, self._local_to_global_rank[rank], group=self.group, async_op=True)
                under_way.append((rank, bucket, values, work, transfer))
        for rank, bucket, values, work, transfer in under_way:
            with transfer:
                work.wait()
            if rank != self.rank and values is not bucket.buffer:
                bucket.buffer.copy_(values)


def _filled(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups that have parameters; OSS looks at the first parameter of the first group."""
    return [group for group in optimizer.param_groups if group["params"]]
