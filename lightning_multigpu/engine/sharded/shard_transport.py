"""The transport of an optimizer's step where whole parameters belong to ranks, which FairScale's OSS divides.

Every parameter belongs to one rank as a whole. That rank has the averaged gradient and the optimizer's state, updates
the parameter, and sends the new value to all ranks::

    rank 0   gradients of p0, p2 --> your optimizer, holding p0 and p2 --> p0, p2 --broadcast--> p0 p1 p2
    rank 1   gradient of p1 -------> your optimizer, holding p1 ---------> p1 ------broadcast--> p0 p1 p2

The user's optimizer object makes the update, with this rank's parameters in its groups, so that any class works with
all its options, also one whose constructor does not take its own ``defaults`` (AdamW).

In FairScale 0.4.13 a group that is added after layers were unfrozen gives all parameters new owners, which lack their
states; :class:`_Shards` keeps the owners.

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
from fairscale.optim import OSS
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.owner_parts import MOST, Bucket, OwnerParts
from lightning_multigpu.communication.tensors import alike
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
        group: the ranks; its meter records the waits.
        parts: moves new values.
        bucket_bytes: of each rank's values, about an eighth of what travels together.
    """

    pushes_early = False

    def __init__(self, optimizer: Optimizer, group: MeteredGroup, parts: OwnerParts, bucket_bytes: int) -> None:
        self.part = OwnedPart(optimizer)
        self.load, self.change = self.part.load_whole, self.part.take_states
        self.shards = _Shards(optimizer, group)
        self._optimizer, self._group, self._parts, self._bucket_bytes = optimizer, group, parts, bucket_bytes
        self._shared: list[int] = []  # the ids of what was shared last, and its buckets
        self._buckets: list[Bucket] = []

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank updates the parameter."""
        return self.shards.owners.get(parameter) == self._group.rank

    def has(self, parameter: Tensor) -> bool:
        """Whether the parameter belongs to the optimizer."""
        return parameter in self.shards.owners

    def view(self) -> PartialState:
        return PartialState(self._optimizer, self._key, own=self.part.states)

    def _key(self, parameter: Any) -> Any:
        """Under which key this rank has a parameter's state; None if another rank has it."""
        return None if self.has(parameter) and parameter not in self.part.pieces else parameter

    def close(self) -> None:
        """Does nothing: OSS has no hooks."""

    @torch.no_grad()
    def share_values(self, parameters: Iterable[Tensor]) -> None:
        """Gives every rank the owners' values of these parameters; a collective."""
        shared = [*parameters]
        if not shared or self._group.size == 1:
            return
        if (ids := [*map(id, shared)]) != self._shared:
            together = alike(shared, full_bytes=MOST * self._group.size * self._bucket_bytes)
            self._buckets = [self._parts.bucket(members, self.shards.owners) for members in together]
            self._shared = ids
        meter, waits = self._group.meter, [*map(self._parts.gather, self._buckets)]
        since = meter.mark(on_stream=any(bucket.members[0].is_cuda for bucket in self._buckets))
        for wait in waits:
            wait()
        meter.waited(since)

    def place(self, new: list[Parameter], given: Mapping[Any, Any]) -> None:
        if new:
            self.shards.follow(self._optimizer)
        for parameter in filter(self.owns, new):
            self.part.pieces[parameter] = parameter, Piece(0, 0, parameter.numel(), 0)
            self.part.take_state(parameter, given.get(parameter, {}))  # some optimizers begin with one
        self.part.take_states({key: state for key, state in given.items() if not isinstance(key, Tensor)})

    def step(self, update: Update) -> None:
        """Updates this rank's parameters, and broadcasts their values."""
        self.part.update(self.part.held(), {}, **update.options)
        self.share_values(parameter for parameter in self.shards.owners if parameter.requires_grad)

    def states(self) -> dict[int, Any]:
        """The states of this rank's parameters."""
        of_all = {key: state for key, state in self.part.states.items() if not isinstance(key, Tensor)}
        return {**self.part.numbered_states(), **of_all}


class _Shards(OSS):  # type: ignore[misc]  # without annotations
    """OSS around an optimizer object instead of a class; parameters stay tensors of their own.

    Attributes:
        owners: the rank of each parameter, which never changes. As in OSS, a new parameter goes to the rank with the
            fewest elements; a frozen parameter counts as one element.
    """

    _partition_parameters: list[list[dict[str, Any]]]

    def __init__(self, optimizer: Optimizer, group: MeteredGroup) -> None:
        self.owners: dict[Tensor, int] = {}
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
                self.partition_parameters()

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
        """OSS would make parameters views of a flat tensor, which code that assigns to ``parameter.data`` leaves."""


def _filled(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups that have parameters; OSS looks at the first parameter of the first group."""
    return [group for group in optimizer.param_groups if group["params"]]
