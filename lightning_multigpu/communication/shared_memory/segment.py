"""Nameless segments of memory that processes of one host share; the kernel frees them however they end.

The first process makes a file in memory (``memfd_create``) and the others open it through ``/proc``. It is no file in
``/dev/shm`` and is not bound by its size, but counts towards the memory of the processes' control group. Processes
of other users cannot open it, and nobody can shorten it. The kernel frees it when the last process that has it is gone.

Every rank of a :class:`SharedSegment` locks one byte of it. The kernel drops the lock when the process ends, even if it
is killed, so that a free byte tells of a rank that is gone.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_NAME = "lightning_multigpu"
_TOKEN_BYTES = 16
_HEADER_BYTES = 64
Offer = tuple[int, int, bytes]  # process, descriptor, and the token by which others know the file


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
                self._descriptor, offer[0] = created_file(total_bytes)
            except OSError as error:
                problem = str(error)
        dist.broadcast_object_list(offer, src=dist.get_process_group_ranks(group)[0], group=group)
        if offer[0] is not None:
            try:
                self._attach(offer[0], total_bytes)
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

    def _attach(self, offer: Offer, total_bytes: int) -> None:
        if self._descriptor < 0:
            self._descriptor = opened_file(offer)
        self._mapping = mmap.mmap(self._descriptor, total_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        # After mmap, which duplicates the descriptor: closing any duplicate would drop the lock.
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.rank)


class OfferedSegment:
    """Memory that this process makes, and processes of the same user and host map by its :attr:`offer`.

    Args:
        size_bytes: of :attr:`memory`. It is reserved at once.

    Attributes:
        memory: zeros at first, shape (size_bytes,), uint8. The mapping lives as long as the tensor or a view of it.
        offer: for :func:`mapped`, as JSON can express it; good while this object lives.

    Raises:
        OSError: there is no such memory.
    """

    def __init__(self, size_bytes: int) -> None:
        self._descriptor, (pid, descriptor, token) = created_file(_HEADER_BYTES + size_bytes)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self.memory = _tensor(self._descriptor)
        self.offer = [pid, descriptor, token.hex()]


def mapped(offer: Sequence[Any]) -> torch.Tensor:
    """The memory of another process's :class:`OfferedSegment`.

    Raises:
        OSError: the process is of another user, or in another container or on another host.
    """
    pid, descriptor, token = offer
    opened = opened_file((int(pid), int(descriptor), bytes.fromhex(token)))
    try:
        return _tensor(opened)
    finally:
        os.close(opened)


def created_file(total_bytes: int) -> tuple[int, Offer]:
    """Makes a nameless file that nobody can shorten; returns its descriptor, and what others need to open it.

    Raises:
        OSError: there is not so much memory, or no descriptor is left.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, total_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        token = os.urandom(_TOKEN_BYTES)
        os.pwrite(descriptor, token, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, (os.getpid(), descriptor, token)


def opened_file(offer: Offer) -> int:
    """A descriptor of another process's file.

    Raises:
        OSError: the process is of another user, or in another container or on another host.
    """
    pid, descriptor, token = offer
    # On another host, or in another container, there may be another process of that id. To open just any file of it
    # could have consequences.
    elsewhere = OSError(f"process {pid} is another one: the processes that share memory are in different containers")
    path = f"/proc/{pid}/fd/{descriptor}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise elsewhere
    opened = os.open(path, os.O_RDWR)
    if os.pread(opened, _TOKEN_BYTES, 0) != token:
        os.close(opened)
        raise elsewhere
    return opened


def _tensor(descriptor: int) -> torch.Tensor:
    """The bytes behind the header, without a descriptor of their own."""
    size_bytes = os.fstat(descriptor).st_size
    whole = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size_bytes, dtype=torch.uint8)
    return whole[_HEADER_BYTES:]
