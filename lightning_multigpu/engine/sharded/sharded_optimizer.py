"""Sharded optimizer: FairScale's OSS spreads its states over the ranks.

Every parameter belongs to one rank as a whole. That rank has the averaged gradient and the optimizer's state, updates
the parameter, and sends the new value to all ranks::

    rank 0   gradients of p0, p2 --> your optimizer, holding p0 and p2 --> p0, p2 --broadcast--> p0 p1 p2
    rank 1   gradient of p1 -------> your optimizer, holding p1 ---------> p1 ------broadcast--> p0 p1 p2

Lightning, schedulers and callbacks keep the user's optimizer object, with all parameters in its groups. That object
makes the update: within a step its groups hold only this rank's parameters, so that any class works with all its
options, also one whose constructor does not take its own ``defaults`` (AdamW).

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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
from lightning_multigpu.communication.metering.collective_observer import ranks_text
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.optimizer_state import PartialState
from lightning_multigpu.engine.redirected_optimizer import RedirectedOptimizer


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


class ShardedOptimizer(RedirectedOptimizer):
    """A user's optimizer; one rank updates each of its parameters.

    Construction, steps and loading are collectives of the group.

    Args:
        optimizer: the optimizer of a module that is the same on all ranks.
        group: the ranks.
        meter: records every broadcast.
        broadcast_dtype: the dtype in which new values travel; None for the parameters' own.
        offload: keep states in the host's memory, and update a copy of this rank's parameters there.

    Attributes:
        shards: FairScale's OSS.

    Raises:
        ValueError: the optimizer evaluates the loss itself, several times a step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: MeteredGroup,
        meter: Meter,
        *,
        broadcast_dtype: torch.dtype | None = None,
        offload: bool = False,
    ) -> None:
        super().__init__(optimizer, "tensors")
        self._offload = offload
        self._copies: dict[Tensor, Parameter] = {}
        self._states = self._new_states()
        self._is_watched = False
        self._group = group
        self._rank = group.rank
        self.shards = _Shards(optimizer, self._update_own, group, meter, broadcast_dtype)
        self._place_new()
        self._states.adopt(optimizer.state)
        if offload:
            optimizer.state = defaultdict(dict)

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank updates the parameter."""
        return self.shards.owners.get(parameter) == self._rank

    def has(self, parameter: Tensor) -> bool:
        """Whether the parameter belongs to the optimizer."""
        return parameter in self.shards.owners

    def refresh(self) -> None:
        """Finds owners for parameters that were added to the optimizer; a collective."""
        self._place_new()

    def share_values(self) -> None:
        """Gives every rank the exact values of the owners; a collective."""
        self.shards.broadcast(None)

    def share_values_of(self, parameters: Iterable[Tensor]) -> None:
        """Gives every rank the owners' values of these parameters, which may be frozen; a collective."""
        for parameter in parameters:
            source = self._group.ranks[self.shards.owners[parameter]]
            self._group.broadcast_tensors([parameter.detach()], src=source)

    def average_gradients(self) -> None:
        """Does nothing: backward has averaged the gradients of this rank's parameters."""

    def _step(self, **options: Any) -> None:
        self.shards.take_assigned()
        self.shards.step(**options)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state dictionary, with the states of this rank's parameters."""
        self._take_state()
        with self._holding(lambda parameter: self._copies.get(parameter, parameter)):
            return self.optimizer.state_dict()

    def watch_state(self) -> None:
        self._is_watched = True
        self.optimizer.state = self._states  # type: ignore[assignment]

    def _new_states(self) -> PartialState:
        def take(_: Any, state: Any) -> Any:
            return tree_map_only(Tensor, Tensor.cpu, state) if self._offload else state

        return PartialState(self.optimizer, self._key, take=take)

    def _key(self, parameter: Any) -> Any:
        """Under which key this rank has a parameter's state; None if another rank has it."""
        return self._copies.get(parameter, parameter) if self.owns(parameter) or not self.has(parameter) else None

    def _take_state(self) -> None:
        """Takes a mapping that user code has put in place; it changes states themselves at once."""
        given = self.optimizer.state
        if self._is_watched and given is not self._states:
            self._states = self._new_states()
            self._states.adopt(given)
            self.watch_state()

    def _change_state(self, changes: Mapping[Parameter, Mapping[str, Any]]) -> None:
        """Does nothing: :meth:`_take_state` has done it."""

    def _update_own(self, **options: Any) -> None:
        for parameter, copy in self._copies.items():
            copy.copy_(parameter)  # a hook may have changed it
            copy.grad = None if parameter.grad is None else parameter.grad.to("cpu")
        with self._holding(lambda p: self._copies.get(p, p) if self.owns(p) else None):
            self._update(**options)
        for parameter, copy in self._copies.items():
            parameter.copy_(copy)
            copy.grad = None

    @contextmanager
    def _holding(self, held: Callable[[Parameter], Parameter | None]) -> Iterator[None]:
        """Within the block the optimizer's groups hold ``held(parameter)`` for each parameter; None leaves it out."""
        optimizer = self.optimizer
        before = [group["params"] for group in optimizer.param_groups]
        outside, optimizer.state = optimizer.state, self._states.own  # type: ignore[assignment]
        for group in optimizer.param_groups:
            group["params"] = [found for parameter in group["params"] if (found := held(parameter)) is not None]
        try:
            yield
        finally:
            self._states.own, optimizer.state = optimizer.state, outside
            for group, parameters in zip(optimizer.param_groups, before, strict=True):  # loading makes new groups
                group["params"] = parameters

    def _place_new(self) -> None:
        self.shards.follow(self.optimizer)
        for parameter in self._parameters() if self._offload else ():
            if self.owns(parameter) and parameter not in self._copies:
                copy = torch.empty_like(parameter, device="cpu", pin_memory=parameter.is_cuda)
                self._copies[parameter] = Parameter(copy, requires_grad=False)

    def _load(self, saved_groups: list[dict[str, Any]], saved_state: Mapping[int, Any]) -> None:
        saved = [number for group in saved_groups for number in group["params"]]
        owned = {number for number, parameter in zip(saved, self._parameters(), strict=True) if self.owns(parameter)}
        own = {number: values for number, values in saved_state.items() if number in owned}
        # An optimizer keeps the given tensors, and so the file that they may be mapped from.
        own = tree_map_only(Tensor, torch.clone, own)
        with self._holding(lambda parameter: self._copies.get(parameter, parameter)):
            self.optimizer.load_state_dict({"state": own, "param_groups": saved_groups})
        self._place_new()


class _Share:
    """This rank's optimizer as OSS steps it."""

    def __init__(self, groups: list[dict[str, Any]], step: Callable[..., None]) -> None:
        self.param_groups = groups
        self.step = step


class _Shards(OSS):  # type: ignore[misc]  # without annotations
    """OSS around an optimizer object instead of a class; the groups are the optimizer's own.

    Attributes:
        owners: the rank of each parameter, which never changes. As in OSS, a new parameter goes to the rank with the
            fewest elements; a frozen parameter counts as one element.
    """

    _partition_parameters: list[list[dict[str, Any]]]
    buckets: dict[Any, dict[int, Any]]

    def __init__(
        self,
        optimizer: Optimizer,
        step: Callable[..., None],
        group: MeteredGroup,
        meter: Meter,
        broadcast_dtype: torch.dtype | None,
    ) -> None:
        self.owners: dict[Tensor, int] = {}
        self._flat: list[tuple[Any, ...]] = []
        self._metered_group = group
        self._meter = meter
        self._broadcast_dtype = broadcast_dtype
        with quiet():
            super().__init__(_filled(optimizer), optim=lambda groups: _Share(groups, step), group=group.group)

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

    def _broadcast_params(self) -> None:
        self.broadcast(self._broadcast_dtype)

    @torch.no_grad()
    def broadcast(self, dtype: torch.dtype | None) -> None:
        """Copies each rank's parameters to all ranks; ``dtype`` rounds them, except on their own rank."""
        under_way = []
        for of_ranks in self.buckets.values():
            for rank, bucket in of_ranks.items():
                rounds = dtype is not None and bucket.buffer.is_floating_point()
                values = bucket.buffer.to(dtype) if rounds else bucket.buffer
                transfer = self._meter.begin(
                    "broadcast",
                    group="shards",
                    group_size=self.world_size,
                    size_bytes=values.nbytes,
                    sent_bytes=values.nbytes if rank == self.rank and self.world_size > 1 else 0,
                    blocking=True,
                    ranks=ranks_text(self._metered_group.ranks),
                    on_stream=values.is_cuda,
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
