"""The process groups of a run, for the collectives that Lightning asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.job.failure_watch import FailureWatch
from lightning_multigpu.job.process_groups import ProcessGroups, leave_world, moves_by_nccl


class Collectives:
    """The collectives of a run over its world or its data axis; the meter records them.

    Where ranks make different calls, or give tensors of different shapes, all raise an error that names the calls and
    their lines. ``metered`` makes the collectives of a group, filed under a name.

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
        self._data = self._metered(groups.data, "metrics")

    @property
    def hosts(self) -> dist.ProcessGroup:
        """All ranks, over a back end between hosts, during a run."""
        assert self._hosts is not None
        return self._hosts.group

    def leave(self) -> None:
        """Leaves the groups at the end of the run."""
        self._world = self._hosts = self._data = self.in_step = None
        if self.groups is not None:
            self.groups.leave(failed=self._watch.failed)
            self.groups = None
        elif self._watch.failed:  # in a hook after the first teardown, which keeps the world's group
            leave_world()

    def over(self, group: Any | None, *, on_hosts: bool = False) -> MeteredGroup | None:
        """The collectives of ``group``, by default of the data axis; None before initialisation and after a failure.

        With ``on_hosts`` those of the world travel between hosts, and not through GPUs.
        """
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
            return self._hosts if on_hosts else self._world
        return self._metered(group, "user")
