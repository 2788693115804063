"""A barrier between processes, made of POSIX semaphores in shared memory.

Each rank owns one semaphore for every other rank. A rank arrives by posting its semaphore at every other rank, and
waits for its own semaphores, one after the other::

    rank 0          rank 1          rank 2
    arrive --post-> [0]             [0]
    [1]   <-post--- arrive --post-> [1]
    ...
    wait [1] [2]    wait [0] [2]    wait [0] [1]

A waiting rank sleeps in the kernel, so that ranks may share a core, and other threads of its process run on. It wakes
up several times a second to check for an ended rank and for :meth:`Barrier.abort`, and to run signal handlers.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable
from typing import Any

_CELL_BYTES = 64  # a cache line: a sem_t takes 32 bytes, and the flag must not share its line with one
_LOOK_UP_S = 0.25
_ABORTED = -1
_EXPECTED_ERRORS = (errno.EINTR, errno.ETIMEDOUT)


class ConnectionLostError(RuntimeError):
    """Another rank has ended, the job was aborted, or the time is up."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Barrier:
    """A barrier of ``world_size`` ranks; each rank makes its own object over the same memory.

    Args:
        memory: zeros at first, writable, at least :meth:`size_bytes`; shared by all ranks.
        names: the number of each rank in messages.
        is_gone: returns whether a rank's process has ended or has closed the memory.

    Raises:
        OSError: the system has no semaphores with a monotonic clock (glibc has them from 2.30 on).
    """

    def __init__(
        self,
        memory: Any,
        *,
        rank: int,
        world_size: int,
        names: list[int],
        is_gone: Callable[[int], bool],
        timeout_s: float,
    ) -> None:
        self._rank = rank
        self._names = names
        self._is_gone = is_gone
        self.timeout_s = timeout_s
        try:
            blocking, short = ctypes.CDLL(None, use_errno=True), ctypes.PyDLL(None)
            self._wait = blocking.sem_clockwait
            # These never block: keeping the interpreter lock is cheaper than releasing it.
            self._post, self._try, self._initialise = short.sem_post, short.sem_trywait, short.sem_init
        except AttributeError as error:
            raise OSError(errno.ENOSYS, f"semaphores: {error}") from error
        self._memory = (ctypes.c_char * self.size_bytes(world_size)).from_buffer(memory)  # keeps it mapped
        start = ctypes.addressof(self._memory)
        self._flag = ctypes.c_int32.from_address(start)
        self._cells = [
            [ctypes.c_void_p(start + _CELL_BYTES * (1 + owner * world_size + poster)) for poster in range(world_size)]
            for owner in range(world_size)
        ]
        peers = [(rank + distance) % world_size for distance in range(1, world_size)]
        self._theirs = [self._cells[peer][rank] for peer in peers]
        self._own = [(peer, self._cells[rank][peer]) for peer in peers]

    @staticmethod
    def size_bytes(world_size: int) -> int:
        """Bytes of memory for ``world_size`` ranks."""
        return _CELL_BYTES * (1 + world_size * world_size)

    def initialise(self) -> None:
        """Makes the semaphores; one rank calls it before any other rank uses them."""
        for cells in self._cells:
            for cell in cells:
                self._initialise(cell, 1, 0)

    def arrive(self) -> None:
        """Arrives; after their wait the other ranks see everything that this rank has written before."""
        for cell in self._theirs:
            self._post(cell)

    def wait(self) -> None:
        """Waits until all others have arrived; each wait belongs to one arrival of this rank.

        Raises:
            ConnectionLostError: a rank has ended, the barrier was aborted, or the time is up; the message says which.
        """
        for peer, cell in self._own:
            if self._try(cell) != 0:
                self._wait_for(peer, cell)
        if self._flag.value != 0:
            raise self._lost()

    def abort(self) -> None:
        """Makes all ranks that wait, or wait later, raise within 0.25 s."""
        self._flag.value = self._flag.value or _ABORTED

    def _wait_for(self, peer: int, cell: ctypes.c_void_p) -> None:
        deadline = time.monotonic() + self.timeout_s
        while True:
            until_s = min(time.monotonic() + _LOOK_UP_S, deadline)
            until = _Timespec(int(until_s), int(until_s % 1 * 1e9))
            if self._wait(cell, time.CLOCK_MONOTONIC, ctypes.byref(until)) == 0:
                return
            number = ctypes.get_errno()
            if number not in _EXPECTED_ERRORS:
                raise OSError(number, f"sem_clockwait: {os.strerror(number)}")
            if self._flag.value != 0:
                raise self._lost()
            # An ended rank may have arrived before its end.
            if self._is_gone(peer) and self._try(cell) != 0:
                self._flag.value = self._flag.value or 1 + peer
                raise self._lost()
            if time.monotonic() >= deadline:
                raise ConnectionLostError(
                    f"shared memory of rank {self._names[self._rank]}: timed out after {self.timeout_s:g} s of "
                    f"waiting for rank {self._names[peer]}"
                )

    def _lost(self) -> ConnectionLostError:
        reason = self._flag.value
        what = (
            "aborted" if reason == _ABORTED else f"connection closed by rank {self._names[reason - 1]}, which is gone"
        )
        return ConnectionLostError(f"shared memory of rank {self._names[self._rank]}: {what}")
