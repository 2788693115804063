"""The process groups of a run: joined at its start, left at its end, also after an error."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.utilities import rank_zero_info
from torch.distributed import Store  # type: ignore[attr-defined]

from lightning_multigpu._torch_compat import new_group_in_order
from lightning_multigpu.communication.connections import Connections
from lightning_multigpu.communication.interface import interface_towards
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.job.guardian.frames import place, stack_of

log = logging.getLogger(__name__)

AXES = ("data", "pipeline", "tensor")

_ABORT_S = 5.0
_COLLECTIVES = (
    *(f"lightning_multigpu/{name}.py" for name in ("communication/metered_group", "job/process_groups")),
    *(f"lightning_multigpu/strategies/{name}.py" for name in ("base", "pack_strategy")),
)

# One for the process, as the world's group: both outlive a run.
CONNECTIONS = Connections()


class ProcessGroups:
    """All ranks, as a mesh, and groups over its axes.

    Args:
        shape: ranks along the data, pipeline and tensor axes; neighbouring ranks differ in the last.
        backend: the default back end of all groups; None for the device's default.
        timeout: the longest time that a collective may wait.
        store: the store of the rendezvous; not needed if this process is in the world already.

    Attributes:
        data: the ranks that differ from this one in the data axis only.
        also_cut: called by :meth:`cut` first, to end other waits of this rank; must not raise.
    """

    def __init__(
        self,
        environment: ClusterEnvironment,
        device: torch.device,
        shape: tuple[int, int, int],
        *,
        backend: str | None,
        timeout: timedelta | None,
        store: Store | None,
    ) -> None:
        self.device = device
        self.backend = backend or dist.get_default_backend_for_device(device)
        self._timeout = timeout
        self.also_cut: list[Callable[[], None]] = []
        self._undo = contextlib.ExitStack()
        self._is_stuck = False
        self._cutting = threading.Lock()
        self._port = environment.main_port
        self.own: list[dist.ProcessGroup] = []
        # The host's name may resolve to an interface that other hosts cannot reach; the route to rank 0 never does.
        interface = interface_towards(environment.main_address)
        if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
            self._set("GLOO_SOCKET_IFNAME", interface)
        try:
            with CONNECTIONS.noted():
                self._join(environment, interface, store)
            # Not by init_device_mesh: in a process that has left a world of NCCL and joined another one, its
            # split_group ended in a segmentation fault (torch 2.11, NCCL 2.31).
            self._ranks = torch.arange(dist.get_world_size()).reshape(shape)
            self.data = self._data_group()
        except BaseException:
            self.leave(failed=True)
            raise

    @property
    def world(self) -> dist.ProcessGroup:
        """All ranks. Lightning leaves it open between runs, and so do we."""
        world = dist.group.WORLD
        assert world is not None
        return world

    def new(self, axis: str, *, backend: str | None = None, descending: bool = False) -> dist.ProcessGroup:
        """A further group over this rank's line of ``axis``; a collective of the whole world.

        It is destroyed at the end of the run, and aborted when a rank fails. With ``descending`` it has the ranks of
        the line in descending order.
        """
        lines = self.lines(axis)
        mine = self.over([line[::-1] for line in lines] if descending else lines, backend=backend)
        assert mine is not None
        return mine

    def lines(self, axis: str) -> list[list[int]]:
        """The ranks of each line of ``axis``; every rank of the world is in one of them."""
        along = self._ranks.movedim(AXES.index(axis), -1)
        return [list(line) for line in along.reshape(-1, along.shape[-1]).tolist()]

    def over(self, lines: list[list[int]], *, backend: str | None = None) -> dist.ProcessGroup | None:
        """A further group over that of the ``lines`` which contains this rank, or None; a collective of the world."""
        mine: dist.ProcessGroup | None = None
        backend = backend or self.backend
        for ranks in lines:
            with CONNECTIONS.noted(), self._unbound(backend):
                group = new_group_in_order(ranks, timeout=self._timeout, backend=backend)
            if dist.get_rank() in ranks:
                mine = group
        if mine is not None:
            self.own.append(mine)
        return mine

    @contextlib.contextmanager
    def _unbound(self, backend: str) -> Iterator[None]:
        """Within the block the world's group is bound to no device, unless the new groups are NCCL's.

        If it is bound, torch makes ranks outside of a new group take part in a split of NCCL's world, also for a Gloo
        group: its members do not take part, and all ranks would wait for ever.
        """
        bound = self.world.bound_device_id
        if backend != "nccl":
            self.world.bound_device_id = None
        try:
            yield
        finally:
            self.world.bound_device_id = bound

    def cut(self) -> None:
        """Aborts all groups: threads of this process that wait in them, and ranks at the other end, get an error.

        First sockets, which takes no time; then groups of CPU back ends; then NCCL's groups, all at the same time: an
        abort of NCCL returns when the device has left the group's kernels, and a kernel may wait for a kernel of
        another group, so that aborts one by one could wait for ever. A device that does not answer is given up after a
        few seconds.
        """
        with self._cutting:
            for cut in self.also_cut:
                cut()
            CONNECTIONS.cut(except_port=self._port)
            over_nccl = []
            for group in [self.world, *self.own]:
                with contextlib.suppress(Exception):
                    if moves_by_nccl(group):
                        over_nccl.append(group)
                    else:
                        group.abort()
            self._is_stuck = not _abort_together(over_nccl)
            if self._is_stuck:
                log.warning("NCCL has not ended its collectives within %g s, and is left as it is", _ABORT_S)

    def leave(self, *, failed: bool) -> None:
        """Destroys the groups of this run; after a failure also the world's group, which has been aborted.

        Groups that cannot be aborted stay, since destroying them could wait for ever.
        """
        own, self.own = self.own, []
        if failed:
            with self._cutting:
                if self._is_stuck:
                    atexit.unregister(leave_world)
                else:
                    leave_world()
        elif dist.is_initialized():
            for group in own:
                dist.destroy_process_group(group)
        self._undo.close()

    def _set(self, name: str, value: str) -> None:
        """Sets a variable until :meth:`leave`: programs that are started later must not inherit it."""
        before, os.environ[name] = os.environ.get(name), value
        self._undo.callback(*(os.environ.pop, name) if before is None else (os.environ.__setitem__, name, before))

    def _data_group(self) -> dist.ProcessGroup:
        """This rank's line of the data axis, without a group of its own where that is the world."""
        lines, rank = self.lines("data"), dist.get_rank()
        if len(lines) == 1:
            return self.world
        if len(lines) < dist.get_world_size():
            group = self.over(lines)
            assert group is not None
            return group
        with self._unbound("any"):  # no split of the world, which all ranks would have to make for each of them
            self.own.append(dist.new_group([rank], backend=self.backend, use_local_synchronization=True))
        return self.own[-1]

    def _join(self, environment: ClusterEnvironment, interface: str | None, store: Store | None) -> None:
        if dist.is_initialized():
            return
        assert store is not None
        self._set("MASTER_ADDR", environment.main_address)
        self._set("MASTER_PORT", str(environment.main_port))
        if self._timeout is not None:
            store.set_timeout(self._timeout)
        dist.init_process_group(
            self.backend,
            store=store,
            rank=environment.global_rank(),
            world_size=environment.world_size(),
            timeout=self._timeout,
            device_id=self.device if self.backend == "nccl" else None,
        )
        if self.backend == "nccl":
            atexit.register(leave_world)  # NCCL warns of groups that exist when the interpreter ends
        rank_zero_info(f"Process group of {environment.world_size()} over {self.backend}, through {interface}")


def metered_group(group: dist.ProcessGroup, meter: Meter, name: str, device: torch.device) -> MeteredGroup:
    """The collectives of ``group``; its tensors travel from ``device`` over NCCL, and else from the CPU."""
    where = device if moves_by_nccl(group) else torch.device("cpu")
    return MeteredGroup(group, meter, name=name, device=where, place=_place_of_call)


def _place_of_call() -> str:
    """The line that has called a collective of the pack, outside of its own layers of collectives."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.endswith(_COLLECTIVES):
        frame = frame.f_back
    return place(stack_of(frame))


def moves_by_nccl(group: dist.ProcessGroup) -> bool:
    """Whether the back end of ``group`` is NCCL."""
    return dist.get_backend(group) == "nccl"


def _abort_together(groups: list[dist.ProcessGroup]) -> bool:
    """Aborts groups of NCCL at the same time; returns whether all aborts have ended in time.

    torch runs each abort in a thread of its own and waits for it. NCCL's group calls, which torch's
    ``_abort_process_group`` makes, have no effect on these threads.
    """

    def abort(group: dist.ProcessGroup) -> None:
        with contextlib.suppress(Exception):
            group.abort()

    threads = [threading.Thread(target=abort, args=(group,), name="abort-nccl", daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + _ABORT_S
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def leave_world() -> None:
    """Destroys every process group of this process."""
    if dist.is_initialized():
        dist.destroy_process_group()
