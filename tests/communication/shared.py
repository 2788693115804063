"""Shared memory over all ranks of the tests' world, and the errors of compression."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.compression import CompressedAllReduce, GradientPiece
from lightning_multigpu.communication.compression.error_feedback import ErrorFeedback
from lightning_multigpu.communication.shared_memory.barrier import ConnectionLostError
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


def rank_of_a_job_with_a_killed_rank(rank: int, directory: Path) -> None:
    """A process of its own, which needs no Lightning. Rank 2 kills itself, the others note what they are told."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=3)
    shared = SharedMemoryAllReduce(dist.new_group(backend="gloo"), chunk_bytes=4096)
    tensor = torch.ones(100_000)
    shared(tensor)
    if rank == 2:
        copies = iter(range(10))
        shared._sum = lambda *_: next(copies, None) is None and os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    try:
        shared(tensor)
    except ConnectionLostError as error:
        (directory / f"rank{rank}").write_text(str(error))
    os._exit(0)  # the connections of gloo are broken


def errors_of(feedback: ErrorFeedback, pieces: Sequence[GradientPiece]) -> Tensor:
    """The errors of a rank before its next step, flat, in the order of the pieces."""
    errors = feedback.take(tuple(pieces))
    feedback.give(tuple(pieces), errors)
    return errors


def total_errors(reduce: CompressedAllReduce, pieces: Sequence[GradientPiece]) -> Tensor:
    """The sum of the errors of all ranks of the world; a collective."""
    total = own_errors(reduce, pieces)
    dist.all_reduce(total)
    return total


def own_errors(reduce: CompressedAllReduce, pieces: Sequence[GradientPiece]) -> Tensor:
    """The errors that a rank keeps for its next step; empty without error feedback."""
    found = [torch.empty(0)]
    reduce.share_errors(pieces, pieces, lambda errors: found.append(errors.clone()))
    return found[-1]
