"""Transport of gradients between ranks: shared memory inside a host, a ring or a compressor between hosts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from torch.nn import Module

from lightning_multigpu.communication.compression import CompressedAllReduce, Compressor
from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.ring import RingAllReduce
from lightning_multigpu.communication.shared_memory.host_all_reduce import SharedMemoryAllReduce
from lightning_multigpu.communication.shared_memory.segment import SharedMemoryUnavailableError
from lightning_multigpu.engine.data_parallel.reducer import CommHook, GradientReducer
from lightning_multigpu.planning.numbers import usual_bucket_bytes

_AXIS = "data"
_HOST_MEMORY_BACKEND = "gloo"


class Groups(Protocol):
    """The process groups of a run, over the axes of its mesh."""

    also_cut: list[Callable[[], None]]

    def new(self, axis: str) -> dist.ProcessGroup: ...

    def lines(self, axis: str) -> list[list[int]]: ...

    def over(self, lines: list[list[int]], *, backend: str | None = None) -> dist.ProcessGroup | None: ...


@dataclass(frozen=True, kw_only=True)
class GradientTransport:
    """Options of how gradients travel over the data axis; :meth:`open` and :meth:`all_reduce` make what moves them.

    Attributes:
        bucket_cap_mb: MiB of gradients that travel together; None takes the default of their route.
        compressor: compresses gradients between hosts; None does not compress.
        shared_memory: let ranks of one host reduce through memory that they share; else each rank counts as a host.
    """

    bucket_cap_mb: float | None = None
    compressor: Compressor | None = None
    shared_memory: bool = True

    def open(
        self,
        groups: Groups,
        meter: Meter,
        *,
        ranks_per_host: int,
        hook: tuple[Any, CommHook] | None,
    ) -> GradientReducer:
        """The reducer of gradients; a collective of all ranks.

        ``ranks_per_host`` neighbours of the data axis share a host. A user's own communication hook and its state move
        the gradients instead.
        """
        group, all_reduce = groups.new(_AXIS), None
        # On GPUs NCCL moves the gradients, unless they are compressed, which is done in the host's memory.
        if hook is None and (dist.get_backend(group) != "nccl" or self.compressor is not None):
            over = partial(groups.over, backend=_HOST_MEMORY_BACKEND)
            all_reduce = self.all_reduce(group, groups.lines(_AXIS), over, lambda rank: rank // ranks_per_host)
            groups.also_cut.append(all_reduce.abort)
        return GradientReducer(group, meter, hook=hook, all_reduce=all_reduce)

    def bucket_cap_mb_of(self, module: Module, reducer: GradientReducer, *, is_hooked: bool) -> float | None:
        """The MiB of the buckets for the parameters that require gradients now; None for DDP's own."""
        all_reduce = reducer.all_reduce
        if self.bucket_cap_mb is not None or all_reduce is None or is_hooked:
            return self.bucket_cap_mb
        total_bytes = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
        return usual_bucket_bytes(total_bytes, between_hosts=all_reduce.between is not None) / 2**20

    def all_reduce(
        self,
        group: dist.ProcessGroup,
        lines: list[list[int]],
        over: Callable[[list[list[int]]], dist.ProcessGroup | None],
        host_of: Callable[[int], object],
    ) -> HierarchicalAllReduce:
        """The all-reduce of tensors in the hosts' memory; if a rank cannot share memory, all ranks use sockets.

        A collective of all ranks.

        Args:
            group: this rank's line; it may serve as the group between hosts.
            lines: the ranks that reduce with each other.
            over: makes a group of Gloo over that of the given lines which contains this rank; a collective.
            host_of: the host of a rank.
        """

        def usable(wanted: list[list[int]]) -> dist.ProcessGroup | None:
            if wanted == lines and dist.get_backend(group) == _HOST_MEMORY_BACKEND:
                return group
            return over(wanted) if wanted else None

        hosts, across = layout(lines, host_of if self.shared_memory else _alone)
        inside_group = usable(hosts)
        inside: SharedMemoryAllReduce | None = None
        problem, problems = "", [""] * dist.get_world_size()
        try:
            inside = None if inside_group is None else SharedMemoryAllReduce(inside_group)
        except SharedMemoryUnavailableError as error:
            problem = str(error)
        dist.all_gather_object(problems, problem)
        if any(problems):
            if inside is not None:
                inside.close()
            _warn(
                f"gradients travel through sockets also between ranks of one host: {next(filter(None, problems))}. "
                "shared_memory=False asks for that without this warning."
            )
            inside, (_, across) = None, layout(lines, _alone)
        between: RingAllReduce | CompressedAllReduce | None = None
        if (between_group := usable(across)) is not None:
            ring = RingAllReduce(between_group)
            between = ring if self.compressor is None else CompressedAllReduce(between_group, self.compressor)
        elif self.compressor is not None:
            _warn(
                f"compression={self.compressor.name!r} has no effect: all ranks are on one host, where they share "
                "memory. shared_memory=False compresses there too, and sends all sums through sockets."
            )
        return HierarchicalAllReduce(inside, between)


def layout(lines: list[list[int]], host_of: Callable[[int], object]) -> tuple[list[list[int]], list[list[int]]]:
    """The ranks that reduce with each other inside a host, where a host has several, and then between hosts.

    If hosts have different numbers of ranks of a line, each rank counts as a host.
    """
    by_host = [_by_host(line, host_of) for line in lines]
    if any(len({len(host) for host in hosts}) > 1 for hosts in by_host):
        by_host = [_by_host(line, _alone) for line in lines]
    inside = [host for hosts in by_host for host in hosts if len(host) > 1]
    between = [list(cross) for hosts in by_host for cross in zip(*hosts, strict=True) if len(cross) > 1]
    return inside, between


def _by_host(line: list[int], host_of: Callable[[int], object]) -> list[list[int]]:
    hosts: dict[object, list[int]] = {}
    for rank in line:
        hosts.setdefault(host_of(rank), []).append(rank)
    return list(hosts.values())


def _alone(rank: int) -> int:
    """Each rank counts as a host."""
    return rank


def _warn(text: str) -> None:
    if dist.get_rank() == 0:
        warnings.warn(text, stacklevel=3)
