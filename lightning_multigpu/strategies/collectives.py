"""Lightning's collective API over the process groups of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.job.failure_watch import FailureWatch
from lightning_multigpu.job.process_groups import ProcessGroups, leave_world, moves_by_nccl

T = TypeVar("T")


class Collectives:
    """The collectives of a run over its world or its data axis; the meter records them.

    Where ranks make different calls, or give tensors of different shapes, all raise an error that names the calls and
    their lines. After a failure they do not communicate: each returns this rank's value, so that saving and teardown do
    not wait for ranks that have ended.

    Args:
        metered: makes the metered collectives of a group, filed under a name.
        watch: knows whether a rank has failed.

    Attributes:
        groups: the process groups of the run; None outside of one.
        in_step: whether the stages of a pipeline are at different places of the program, where collectives of the world
            go over the data axis; None without a pipeline.
    """

    def __init__(self, metered: Callable[[dist.ProcessGroup, str], MeteredGroup], watch: FailureWatch) -> None:
        self.groups: ProcessGroups | None = None
        self.in_step: Callable[[], bool] | None = None
        self._metered, self._watch = metered, watch
        self._world: MeteredGroup | None = None
        self._hosts: MeteredGroup | None = None
        self._data: MeteredGroup | None = None

    @property
    def world(self) -> MeteredGroup:
        """All ranks, during a run."""
        assert self._world is not None
        return self._world

    @property
    def data(self) -> MeteredGroup:
        """The ranks that differ in the data axis only, during a run; the main thread uses it, as it does the world."""
        assert self._data is not None
        return self._data

    def join(self, groups: ProcessGroups) -> None:
        """Takes the groups of a run."""
        self.groups = groups
        self._world = self._hosts = self._metered(groups.world, "world")
        if moves_by_nccl(groups.world) and self._world.size > 1:
            hosts = groups.over([self._world.ranks], backend="gloo")
            assert hosts is not None
            self._hosts = self._metered(hosts, "world")
        self._data = self._metered(groups.mesh.get_group("data"), "metrics")

    def control(self) -> dist.ProcessGroup:
        """All ranks, for small messages between hosts; a collective of the whole world."""
        assert self.groups is not None
        return self.groups.control()

    def leave(self) -> None:
        """Leaves the groups at the end of the run."""
        self._world = self._hosts = self._data = self.in_step = None
        if self.groups is not None:
            self.groups.leave(failed=self._watch.failed)
            self.groups = None
        elif self._watch.failed:  # in a hook after the first teardown, which keeps the world's group
            leave_world()

    def over(self, group: Any | None) -> MeteredGroup | None:
        """The collectives of ``group``, by default of the data axis; None before initialisation and after a failure."""
        if not dist.is_initialized() or self._watch.failed:
            return None
        if group is dist.group.WORLD and self.in_step is not None and self.in_step():
            group = None
        if group is None and self._data is not None:
            return self._data
        if group in (None, dist.group.WORLD):
            if self._world is None:
                assert dist.group.WORLD is not None
                return self._metered(dist.group.WORLD, "world")
            return self._world
        return self._metered(group, "user")

    def reduce(self, tensor: Any, group: Any | None, reduce_op: Any) -> Any:
        metered = self.over(group) if isinstance(tensor, Tensor) else None
        return tensor if metered is None else metered.all_reduce(tensor, reduce_op, checked=f"reduce ({reduce_op})")

    def barrier(self) -> None:
        if (world := self.over(dist.group.WORLD)) is not None:
            world.barrier()

    def broadcast(self, obj: T, src: int) -> T:
        """The object of rank ``src``; within a step, of the rank in ``src``'s pipeline with this rank's stages."""
        world = self.over(dist.group.WORLD)
        if world is not None and world is self._data:
            size = self.world.size // world.size
            src = src // size * size + self.world.rank % size
        return obj if world is None else world.broadcast_object(obj, src)

    def gather_objects(self, obj: T) -> list[T]:
        world = self.over(dist.group.WORLD)
        return [obj] if world is None else world.gather_objects(obj)

    def all_gather(self, tensor: Tensor, group: Any | None, sync_grads: bool) -> Tensor:
        """Where several ranks train on the same batch, the world means the data axis: it is Lightning's default."""
        splits_model = self._data is not None and self._data.size < self.world.size
        metered = self.over(None if splits_model and group is dist.group.WORLD else group)
        return tensor if metered is None else metered.all_gather(tensor, sync_grads=sync_grads)

    def decide(self, decision: bool, all: bool) -> bool:
        """Whether all ranks of the world, or with ``all=False`` any of them, decide so.

        The votes travel between hosts, and not through GPUs: a host that asked its GPU for the result after each batch
        would wait for the batch to end, and could not launch the next one meanwhile.
        """
        world = self.over(dist.group.WORLD)
        if world is None or world.size == 1:
            return decision
        if world is self._world and self._hosts is not None:
            world = self._hosts
        votes = int(world.all_reduce(torch.tensor(int(decision)), "sum", checked="reduce_boolean_decision"))
        return votes == world.size if all else votes > 0
