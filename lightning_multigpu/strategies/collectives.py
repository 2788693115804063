"""What strategies answer Lightning with when it asks all ranks something: the same on every rank."""

from __future__ import annotations

from abc import ABC
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from typing_extensions import override

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.runtime.failure_watch import FailureWatch
from lightning_multigpu.runtime.process_groups import metered_group

T = TypeVar("T")


class CollectiveStrategy(ParallelStrategy, ABC):
    """Lightning's collectives over the world or the data axis, told to the meter.

    After a failure nobody is asked any more: each call answers with what this rank has, so that saving and tearing
    down do not wait for ranks that are gone.
    """

    meter: Meter
    failure_watch: FailureWatch
    _world: MeteredGroup | None
    _data: MeteredGroup | None

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """The reduction of ``tensor`` over the data axis (or ``group``), the same on every rank; others pass through.

        The input is not changed. The mean of integers is a floating-point number.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        metered = self._metered_group(group)
        return tensor if metered is None else metered.all_reduce(tensor, reduce_op)

    @override
    def barrier(self, name: str | None = None) -> None:
        world = self._metered_group(dist.group.WORLD)
        if world is not None:
            world.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        world = self._metered_group(dist.group.WORLD)
        return obj if world is None else world.broadcast_object(obj, src)

    def gather_objects(self, obj: T) -> list[T]:
        """A picklable object of every rank, in rank order, on every rank. A collective of the whole world."""
        world = self._metered_group(dist.group.WORLD)
        return [obj] if world is None else world.gather_objects(obj)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Tensors of every data rank (or of ``group``), stacked: shape (ranks, *tensor.shape).

        With ``sync_grads`` the gradient of a rank's tensor is the sum of what all ranks' results contribute to it.
        """
        metered = self._metered_group(group)
        return tensor if metered is None else metered.all_gather(tensor, sync_grads=sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """The same answer on every rank of the world: whether all, or any, of them said yes."""
        world = self._metered_group(dist.group.WORLD)
        if world is None:
            return decision
        votes = int(world.all_reduce(torch.tensor(int(decision)), "sum"))
        return votes == world.size if all else votes > 0

    def _metered_group(self, group: Any | None) -> MeteredGroup | None:
        """The group to communicate over; None where there is nobody to talk to, or no longer."""
        if not dist.is_initialized() or self.failure_watch.failed:
            return None
        if group is None and self._data is not None:
            return self._data
        if group in (None, dist.group.WORLD):
            return self._world or self.metered(_world(), "world")
        return self.metered(group, "user")

    def metered(self, group: dist.ProcessGroup, name: str) -> MeteredGroup:
        """The collectives of ``group``, filed by the meter under ``name``."""
        return metered_group(group, self.meter, name, self.root_device)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world
