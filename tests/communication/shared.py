"""Shared memory over all ranks of the tests' world, and the errors of compression."""

import contextlib
import resource
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.compression import CompressedAllReduce
from lightning_multigpu.communication.shared_memory.host_all_reduce import SharedMemoryAllReduce
from tests.world import init_group

CHUNK_BYTES = 4096
DIRECT_BYTES = 2048


@contextlib.contextmanager
def shared_memory(**options: Any) -> Iterator[SharedMemoryAllReduce]:
    """With chunks so small that short tensors have many; closed at the end."""
    init_group()
    group = dist.new_group(backend="gloo")
    shared = SharedMemoryAllReduce(group, **{"chunk_bytes": CHUNK_BYTES, "direct_bytes": DIRECT_BYTES, **options})
    try:
        yield shared
    finally:
        shared.close()
        dist.destroy_process_group(group)


@contextlib.contextmanager
def short_of_memory() -> Iterator[None]:
    """Within the block this process makes no file, and no shared memory, of more than 64 KiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def own_errors(reduce: CompressedAllReduce, *keys: str) -> Tensor:
    """The errors that a rank keeps of these tensors for its next step, flat; empty without error feedback."""
    if reduce._errors is None:
        return torch.empty(0)
    return torch.cat([reduce._errors._tensors[key].before for key in keys])
