"""Shared memory over all ranks of the tests' world."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from lightning_multigpu.communication.shared_memory import SharedMemoryAllReduce
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
