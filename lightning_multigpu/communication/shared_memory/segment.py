"""Nameless segments of memory that processes of one host share; the kernel frees them after any kind of end.

The first process makes a file in memory (``memfd_create``), and the others open it through ``/proc``. The file is not
in ``/dev/shm``, whose size does not limit it, but counts towards the memory of the processes' control group. Processes
of other users cannot open it, and no process can shorten it. The kernel frees it when the last process that uses it has
ended.

Every rank of a :class:`SharedSegment` locks one byte of it. The kernel drops the lock when the process ends, even if it
is killed. So a free byte means that its rank has ended.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_NAME = "lightning_multigpu"
_TOKEN_BYTES = 16
_HEADER_BYTES = 64
Offer = tuple[int, int, bytes]  # process, descriptor, and a token that identifies the file


class SharedMemoryUnavailableError(RuntimeError):
    """The ranks cannot share memory; the message says why."""

    @classmethod
    def of(cls, problems: Sequence[str | None]) -> SharedMemoryUnavailableError:
        """The error of the first rank of a host that has a problem, from those of all."""
        rank, reason = next((rank, reason) for rank, reason in enumerate(problems) if reason)
        return cls(f"rank {rank} of {len(problems)} on this host: {reason}")


class SharedSegment:
    """Memory shared by the ranks of a group; the constructor is a collective of the group.

    Args:
        group: ranks of one host, over a back end for CPU tensors (gloo); used only by the constructor.
        size_bytes: size of :attr:`memory`, the same on every rank; reserved at once.

    Attributes:
        memory: zeros at first, shape (size_bytes,), uint8; None when closed. The mapping lives as long as the tensor or
            a view of it.

    Raises:
        SharedMemoryUnavailableError: a rank cannot reach the memory; all ranks raise.
    """

    memory: torch.Tensor | None = None

    def __init__(self, group: dist.ProcessGroup, size_bytes: int) -> None:
        self.rank = dist.get_rank(group)
        self._descriptor = -1
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
                if self._descriptor < 0:
                    self._descriptor = opened_file(offer[0])
                self.memory = _tensor(self._descriptor)
                # After the mapping, for which torch opens and closes the file: that would drop the lock.
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.rank)
            except (OSError, RuntimeError) as error:  # torch's error of a mapping is a RuntimeError
                problem = str(error)
        problems: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
        if any(problems):
            self.close()
            raise SharedMemoryUnavailableError.of(problems)

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
        self.memory = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class OfferedSegment:
    """Memory of this process, which processes of the same user and host can map with its :attr:`offer`.

    Args:
        size_bytes: size of :attr:`memory`; reserved at once.

    Attributes:
        memory: zeros at first, shape (size_bytes,), uint8. The mapping lives as long as the tensor or a view of it.
        offer: the argument of :func:`mapped`; valid while this object lives.

    Raises:
        OSError: there is not enough memory.
    """

    def __init__(self, size_bytes: int) -> None:
        descriptor, self.offer = created_file(_HEADER_BYTES + size_bytes)
        weakref.finalize(self, os.close, descriptor)
        self.memory = _tensor(descriptor)


def mapped(offer: Offer) -> torch.Tensor:
    """The memory of another process's :class:`OfferedSegment`.

    Raises:
        OSError: the process is of another user, or in another container or on another host.
    """
    opened = opened_file(offer)
    try:
        return _tensor(opened)
    finally:
        os.close(opened)


def created_file(total_bytes: int) -> tuple[int, Offer]:
    """Makes a nameless file that no process can shorten; returns its descriptor, and the offer for other processes.

    Raises:
        OSError: there is not enough memory, or no descriptor is left.
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
    # On another host, or in another container, another process may have that id. Opening any file of it could have
    # side effects.
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
    """The bytes after the header; the tensor keeps no descriptor."""
    size_bytes = os.fstat(descriptor).st_size
    whole = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size_bytes, dtype=torch.uint8)
    return whole[_HEADER_BYTES:]
