"""The way of gradients between ranks: shared memory inside a host, a ring or a compressor between hosts."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn

from lightning_multigpu.communication.compression import CompressedAllReduce, Compressor
from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce
from lightning_multigpu.communication.ring import RingAllReduce
from lightning_multigpu.communication.shared_memory.host_all_reduce import SharedMemoryAllReduce
from lightning_multigpu.communication.shared_memory.segment import SharedMemoryUnavailableError
from lightning_multigpu.runtime.process_groups import ProcessGroups

_BACKEND = "gloo"


@dataclass(frozen=True)
class Layout:
    """Which ranks reduce with which.

    Attributes:
        inside: ranks of one host, for each host and line; empty where no host has two ranks of a line.
        between: ranks that hold the same shard on each host; empty where there is one host.
    """

    inside: list[list[int]]
    between: list[list[int]]


def layout(lines: list[list[int]], ranks_per_host: int, *, use_hosts: bool = True) -> Layout:
    """How the ranks of each line are arranged on hosts: rank r is on host r // ranks_per_host.

    Where hosts have different numbers of ranks of a line, or with ``use_hosts`` off, each rank counts as a host.
    """
    by_host = [_by_host(line, ranks_per_host) if use_hosts else [[rank] for rank in line] for line in lines]
    if any(len({len(host) for host in hosts}) > 1 for hosts in by_host):
        by_host = [[[rank] for rank in line] for line in lines]
    inside = [host for hosts in by_host for host in hosts if len(host) > 1]
    between = [list(cross) for hosts in by_host for cross in zip(*hosts, strict=True) if len(cross) > 1]
    return Layout(inside, between)


def gradient_all_reduce(
    groups: ProcessGroups,
    axis: str,
    *,
    ranks_per_host: int,
    compressor: Compressor | None,
    shared_memory: bool,
    compress_inside_hosts: bool,
) -> HierarchicalAllReduce:
    """The all-reduce over this rank's line of ``axis``, for tensors in the host's memory; a collective of the world.

    Args:
        groups: of the run; they cut it when a rank fails.
        axis: of the mesh.
        ranks_per_host: neighbouring ranks that share a host.
        compressor: what travels between hosts in place of the tensors.
        shared_memory: whether ranks of a host use it; where it cannot be had, all ranks do without, with a warning.
        compress_inside_hosts: compress between all ranks, as if each had a host of its own.
    """
    lines = groups.lines(axis)
    arranged = layout(lines, ranks_per_host, use_hosts=shared_memory and not compress_inside_hosts)
    inside_group = groups.over(arranged.inside, backend=_BACKEND) if arranged.inside else None
    inside, problem = _shared_memory(inside_group)
    problems: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if any(problems):
        if inside is not None:
            inside.close()
        rank_zero_warn(
            f"gradients travel through sockets also between ranks of one host: {next(filter(None, problems))}. "
            "RingDDPStrategy(shared_memory=False) asks for that without this warning."
        )
        inside, inside_group, arranged = None, None, layout(lines, ranks_per_host, use_hosts=False)
    between_group = groups.over(arranged.between, backend=_BACKEND) if arranged.between else None
    if compressor is not None and between_group is None:
        rank_zero_warn(
            f"compression={compressor!r} has no effect: all ranks are on one host, where they share memory. "
            "compress_inside_hosts=True compresses there too."
        )
    between: RingAllReduce | CompressedAllReduce | None = None
    if between_group is not None:
        between = RingAllReduce(between_group) if compressor is None else CompressedAllReduce(between_group, compressor)
    all_reduce = HierarchicalAllReduce(inside, between, inside_group=inside_group)
    groups.also_cut.append(all_reduce.abort)
    return all_reduce


def _shared_memory(group: dist.ProcessGroup | None) -> tuple[SharedMemoryAllReduce | None, str]:
    if group is None:
        return None, ""
    try:
        return SharedMemoryAllReduce(group), ""
    except SharedMemoryUnavailableError as error:
        return None, str(error)


def _by_host(line: list[int], ranks_per_host: int) -> list[list[int]]:
    hosts: dict[int, list[int]] = {}
    for rank in line:
        hosts.setdefault(rank // ranks_per_host, []).append(rank)
    return list(hosts.values())
