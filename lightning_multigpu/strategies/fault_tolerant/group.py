"""The process group of the members, which torchft makes anew when they change."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from lightning_multigpu._torch_compat import forget_failed_worlds, set_group_timeout
from lightning_multigpu._torchft import torchft
from lightning_multigpu.communication.connections import Connections
from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce
from lightning_multigpu.engine.data_parallel.gradient_transport import GradientTransport

if TYPE_CHECKING:
    from lightning_multigpu.strategies.fault_tolerant.members import Members


def group_class() -> Any:
    """torchft's group of Gloo, as the default process group: that is what metrics and user code communicate over."""
    groups = torchft("process_group")

    class Group(groups.ProcessGroupGloo):  # type: ignore[misc, name-defined]
        def __init__(
            self, address: str, store: TCPStore, members: Members, transport: GradientTransport, timeout: timedelta
        ) -> None:
            super().__init__(timeout=timeout)
            self._address, self._store, self._members, self._transport = address, store, members, transport
            self._handles: list[str] = []
            self.connections = Connections()
            self.all_reduce = HierarchicalAllReduce(None, None)

        def get_reconfigure_handle(self) -> str:
            place = f"{self._address}:{self._store.port}"
            own = {"id": self._handle_id(), "store": place, "global_rank": self._members.rank, "pid": os.getpid()}
            return json.dumps(own)

        def reconfigure(self, opts: Any) -> Any:
            self._handles = opts.handles
            return super().reconfigure(opts)

        def shrink(self, kept: Sequence[int], uuid: int) -> None:
            options = groups.ReconfigureOptions()
            options.uuid, options.handles = uuid, [self._handles[each] for each in kept]
            try:
                self.reconfigure(options)
            except RuntimeError:
                self._members.split()

        def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
            forget_failed_worlds()
            if rank == 0:  # the group, which outlives a run, keeps the store that it was made by
                store = PrefixStore(f"torchft/{self._uuid}", self._store)
            self.connections = Connections()
            peers = [json.loads(handle) for handle in self._handles]
            hosts = [peer["store"].rpartition(":")[0] for peer in peers]
            with self.connections.noted():
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=self._timeout)
                group: Any = dist.group.WORLD
                everybody = [[*range(world_size)]]
                self.all_reduce = self._transport.all_reduce(group, everybody, self._over, hosts.__getitem__)
            slow = timedelta(seconds=self._members.limits.straggler_timeout_s)
            set_group_timeout(slow, group)  # of what waits outside of steps
            self._members.processes = {"{global_rank}/{pid}/{id}".format(**peer): peer["global_rank"] for peer in peers}
            return group

        def _over(self, lines: list[list[int]]) -> dist.ProcessGroup | None:
            """The group of the line that has this rank."""
            groups = [dist.new_group(line, timeout=self._timeout) for line in lines]
            return next((g for g, line in zip(groups, lines, strict=True) if dist.get_rank() in line), None)

        def abort(self, errored: bool = True) -> None:
            self._pg = None
            self.all_reduce.close()  # without its abort: a slower member may still be in a sum that this one has ended
            if dist.is_initialized():
                self.connections.cut()  # wakes members that wait in a collective; abort does not
                dist.group.WORLD.abort()  # type: ignore[union-attr]
                dist.destroy_process_group()

    return Group
