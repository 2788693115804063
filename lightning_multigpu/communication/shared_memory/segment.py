"""A nameless segment of memory that the ranks of one host share; the kernel frees it however they end.

The first rank makes a file in memory (``memfd_create``) and the others open it through ``/proc``. It is no file in
``/dev/shm`` and is not bound by its size, but counts towards the memory of the ranks' control group. The kernel frees
it when the last process that has it is gone.

Every rank locks one byte of it. The kernel drops the lock when the process ends, even if it is killed, so that a free
byte tells of a rank that is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from typing import Any

import torch.distributed as dist

_NAME = "lightning_multigpu"
_TOKEN_BYTES = 16
_HEADER_BYTES = 64


class SharedMemoryUnavailableError(RuntimeError):
    """The ranks cannot share memory; the message says why."""


class SharedSegment:
    """Memory shared by the ranks of a group; making one is a collective of the group.

    Args:
        group: ranks of one host, over a back end that moves CPU tensors (gloo). Only used in here.
        size_bytes: of :attr:`memory`; the same on every rank. It is reserved at once.

    Raises:
        SharedMemoryUnavailableError: a rank cannot reach the memory; all ranks raise.
    """

    def __init__(self, group: dist.ProcessGroup, size_bytes: int) -> None:
        self.rank = dist.get_rank(group)
        self._descriptor = -1
        self._mapping: mmap.mmap | None = None
        total_bytes = _HEADER_BYTES + size_bytes
        offer: list[Any] = [None]
        problem = None
        if self.rank == 0:
            try:
                offer = [self._create(total_bytes)]
            except OSError as error:
                problem = str(error)
        dist.broadcast_object_list(offer, src=dist.get_process_group_ranks(group)[0], group=group)
        if offer[0] is not None:
            try:
                self._attach(*offer[0], total_bytes=total_bytes)
            except OSError as error:
                problem = str(error)
        problems: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
        if any(problems):
            self.close()
            rank, reason = next((rank, reason) for rank, reason in enumerate(problems) if reason)
            raise SharedMemoryUnavailableError(f"rank {rank} of {len(problems)} on this host: {reason}")

    @property
    def memory(self) -> memoryview:
        """The shared bytes, zeros at first. The mapping lives as long as anything that was made from them.

        Raises:
            RuntimeError: the segment is closed.
        """
        if self._mapping is None:
            raise RuntimeError("the shared memory of this group is closed")
        return memoryview(self._mapping)[_HEADER_BYTES:]

    def is_gone(self, rank: int) -> bool:
        """Whether the process of another rank has ended or has closed its segment."""
        if self._descriptor < 0:
            return False
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, rank)
        return True

    def close(self) -> None:
        """Releases the memory; a second call does nothing."""
        self._mapping = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _create(self, total_bytes: int) -> tuple[int, int, bytes]:
        """Makes the file; returns process, descriptor, and the token by which the others know it."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        self._descriptor = os.memfd_create(_NAME)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            os.posix_fallocate(self._descriptor, 0, total_bytes)
            token = os.urandom(_TOKEN_BYTES)
            os.pwrite(self._descriptor, token, 0)
            on_failure.pop_all()
        return os.getpid(), self._descriptor, token

    def _attach(self, pid: int, descriptor: int, token: bytes, *, total_bytes: int) -> None:
        # On another host, or in another container, there may be another process of that id. To open just any file of
        # it could have consequences.
        elsewhere = OSError(f"process {pid} is not the first rank of this group: the ranks are in different containers")
        if self._descriptor < 0:
            path = f"/proc/{pid}/fd/{descriptor}"
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                raise elsewhere
            self._descriptor = os.open(path, os.O_RDWR)
        if os.pread(self._descriptor, _TOKEN_BYTES, 0) != token:
            raise elsewhere
        self._mapping = mmap.mmap(self._descriptor, total_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        # After mmap, which duplicates the descriptor: closing any duplicate would drop the lock.
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.rank)
