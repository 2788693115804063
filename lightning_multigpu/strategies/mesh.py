"""The ranks of a run as a mesh, process groups over its axes, and Lightning's collective API over those groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.runtime.failure_watch import FailureWatch
from lightning_multigpu.runtime.process_groups import ProcessGroups, leave_world, metered_group
from lightning_multigpu.runtime.run_context import RunContext

T = TypeVar("T")


class MeshStrategy(ParallelStrategy, ABC):
    """The ranks as a mesh with the axes data, pipeline and tensor; neighbouring ranks differ in the last axis.

    By default all ranks are on the data axis. A strategy that splits the model sets :attr:`pipeline_parallel_size` and
    :attr:`tensor_parallel_size`::

        rank                      0  1  2  3  4  5  6  7
        data_parallel_rank        0  0  0  0  1  1  1  1      with pipeline_parallel_size = 4
                                                              or both sizes 2: then also
        tensor_parallel_rank      0  1  0  1  0  1  0  1

    Lightning's collectives run over the world or the data axis, and the meter records them. Where ranks make different
    calls, or give tensors of different shapes, all raise an error that names the calls and their lines. After a failure
    they do not communicate: each returns this rank's value, so that saving and teardown do not wait for ranks that have
    ended.

    Args:
        process_group_backend: the default back end of all groups; None for the device's default.
        timeout: the longest time that a collective may wait.
        options: options of Lightning's strategies.
    """

    pipeline_parallel_size = 1
    tensor_parallel_size = 1
    meter: Meter
    failure_watch: FailureWatch

    def __init__(self, *, process_group_backend: str | None, timeout: timedelta, **options: Any) -> None:
        super().__init__(**options)
        self.groups: ProcessGroups | None = None
        self.num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout: timedelta | None = timeout
        self._world: MeteredGroup | None = None
        self._data: MeteredGroup | None = None

    @property
    @abstractmethod
    def run_context(self) -> RunContext:
        """The ranks, devices and limits of the run, as they are set now."""

    @property
    def is_distributed(self) -> bool:
        """True: Lightning then injects a distributed sampler, and reduces logs with ``sync_dist=True``."""
        return True

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def mesh(self) -> DeviceMesh | None:
        """The ranks along the axes data, pipeline and tensor; None outside a run."""
        return None if self.groups is None else self.groups.mesh

    @property
    def process_group_backend(self) -> str | None:
        return self._process_group_backend

    @property
    def data_parallel_size(self) -> int:
        """Number of data ranks: of different batches in one step."""
        return max(1, self.num_nodes * self.num_processes // self._model_parallel_size)

    @property
    def data_parallel_rank(self) -> int:
        """The index of this rank's batch among them."""
        return self.global_rank // self._model_parallel_size

    @property
    def tensor_parallel_rank(self) -> int:
        """The index of this rank's part of each split layer."""
        return self.global_rank % self.tensor_parallel_size

    @property
    def _data_group(self) -> dist.ProcessGroup:
        """The ranks that differ in the data axis only; the main thread uses it, as it does the world's."""
        assert self._data is not None
        return self._data.group

    @property
    def _model_parallel_size(self) -> int:
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    def set_world_ranks(self) -> None:
        """Tells the cluster environment and Lightning's rank-zero helpers which rank this is."""
        if self.cluster_environment is not None:
            self.run_context.tell_ranks()

    def environment_variables(self) -> dict[str, str]:
        """Environment variables for back ends during the run; variables that the user has set stay."""
        return {}

    def new_group(self, axis: str, *, backend: str | None = None, descending: bool = False) -> dist.ProcessGroup:
        """A further group over this rank's line of ``axis``; a collective of the whole world.

        It is destroyed at the end of the run, and aborted when a rank fails. With ``descending`` its ranks are in
        descending order.
        """
        assert self.groups is not None
        return self.groups.new(axis, backend=backend, descending=descending)

    def _control_group(self) -> dist.ProcessGroup:
        """All ranks, for small messages between hosts; a collective of the whole world."""
        assert self.groups is not None
        return self.groups.control()

    def _join_groups(self, store: Store | None) -> tuple[ProcessGroups, MeteredGroup]:
        """Joins the other ranks through ``store``; returns the groups, and the collectives of the world."""
        assert self.cluster_environment is not None
        self.groups = groups = ProcessGroups(
            self.cluster_environment,
            self.root_device,
            (self.data_parallel_size, self.pipeline_parallel_size, self.tensor_parallel_size),
            backend=self._process_group_backend,
            timeout=self._timeout,
            variables=self.environment_variables(),
            store=store,
        )
        self._process_group_backend = groups.backend
        self._world = world = self.metered(groups.world, "world")
        self._data = self.metered(groups.mesh.get_group("data"), "metrics")
        return groups, world

    def _leave_groups(self) -> None:
        self._world = self._data = None
        if self.groups is not None:
            self.groups.leave(failed=self.failure_watch.failed)
            self.groups = None
        elif self.failure_watch.failed:  # in a hook after the first teardown, which keeps the world's group
            leave_world()

    # Lightning's collectives

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """The reduction of ``tensor`` over the data axis (or ``group``), the same on every rank.

        Other objects than tensors are returned. The input is not changed. The mean of integers is a floating-point
        number.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        metered = self._metered_group(group)
        if metered is None:
            return tensor
        return metered.all_reduce(tensor, reduce_op, checked=f"reduce ({reduce_op})")

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

        Where several ranks train on the same batch, the world means the data axis too: ``LightningModule.all_gather``
        passes it by default. With ``sync_grads`` the gradient of a rank's tensor is the sum of the gradients of all
        ranks' results.
        """
        means_data_axis = group is dist.group.WORLD and self._model_parallel_size > 1
        metered = self._metered_group(None if means_data_axis else group)
        return tensor if metered is None else metered.all_gather(tensor, sync_grads=sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """True if all ranks of the world, or with ``all=False`` any of them, decide so; the same on every rank."""
        world = self._metered_group(dist.group.WORLD)
        if world is None:
            return decision
        votes = int(world.all_reduce(torch.tensor(int(decision)), "sum", checked="reduce_boolean_decision"))
        return votes == world.size if all else votes > 0

    def _metered_group(self, group: Any | None) -> MeteredGroup | None:
        """The group to communicate over; None before initialisation and after a failure."""
        if not dist.is_initialized() or self.failure_watch.failed:
            return None
        if group is None and self._data is not None:
            return self._data
        if group in (None, dist.group.WORLD):
            if self._world is None:
                assert dist.group.WORLD is not None
                return self.metered(dist.group.WORLD, "world")
            return self._world
        return self.metered(group, "user")

    def metered(self, group: dist.ProcessGroup, name: str) -> MeteredGroup:
        """The collectives of ``group``, filed by the meter under ``name``."""
        return metered_group(group, self.meter, name, self.root_device)
