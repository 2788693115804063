"""Tensors in shared memory, which ranks of a host reduce in place without copies.

Every rank has a tensor of its own, here of two halves (a0 is rank 0's part of a; capitals are complete sums)::

                      rank 0's tensor    rank 1's tensor
    start             a0 b0              a1 b1              all wait until all are there
    rank 0 writes     A  .               A  .               rank r sums the r-th part of all tensors,
    rank 1 writes     .  B               .  B               and writes the sums into all of them
    end               A  B               A  B               all wait until all have written
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_multigpu.communication.shared_memory.segment import SharedMemoryUnavailableError


class InPlaceTensors:
    """Tensors that each rank of a host has moved into shared memory, so that all ranks reach them.

    The memory is a nameless file: torch makes it in ``/dev/shm`` and removes its name at once. The kernel frees it when
    the last process that uses it has ended.

    Args:
        rank: this process's rank on the host. The host's ranks already share a :class:`~.segment.SharedSegment`, so
            they can open each other's files.
        exchange: an all-gather of a short text, in the order of ranks.
    """

    def __init__(self, rank: int, exchange: Callable[[str], list[str]]) -> None:
        self._rank = rank
        self._exchange = exchange
        self._by_key: dict[int, tuple[Tensor, ...]] = {}
        self._by_place: dict[tuple[int, int, torch.dtype], tuple[Tensor, ...]] = {}

    def rows(self, flat: Tensor) -> tuple[Tensor, ...] | None:
        """Every rank's tensor that belongs to ``flat``, in the order of ranks; None if it was not moved."""
        return self._by_place.get(_place(flat))

    def move(self, flat: Tensor, key: int) -> None:
        """Moves ``flat`` and all of its views, with their values; a collective.

        Args:
            flat: contiguous, on the CPU, alone in its storage; equally long on every rank.
            key: a number for it; replaces an earlier tensor with this number.

        Raises:
            SharedMemoryUnavailableError: a rank cannot reach the memory; all ranks raise. The tensor stays usable.
        """
        offer = problem = ""
        try:
            offer = _offered(flat)
        except (OSError, RuntimeError) as error:
            problem = str(error)
        paths = self._exchange(offer)
        rows: list[Tensor] = []
        if all(paths):
            try:
                rows = [flat if rank == self._rank else _mapped(path, flat) for rank, path in enumerate(paths)]
            except (OSError, RuntimeError) as error:
                problem = str(error)
        problems = self._exchange(problem)
        if any(problems):
            raise SharedMemoryUnavailableError.of(problems)
        if (replaced := self._by_key.pop(key, None)) is not None:
            del self._by_place[_place(replaced[self._rank])]
        self._by_key[key] = self._by_place[_place(flat)] = tuple(rows)

    def close(self) -> None:
        """Releases the other ranks' memory."""
        self._by_key.clear()
        self._by_place.clear()


def _place(flat: Tensor) -> tuple[int, int, torch.dtype]:
    """The memory of a tensor; a part of the tensor may begin at the same address."""
    return flat.data_ptr(), flat.numel(), flat.dtype


def _offered(flat: Tensor) -> str:
    """Moves the tensor's storage, and so its views, into shared memory; returns a path to the memory."""
    storage = flat.untyped_storage()
    if flat.storage_offset() != 0 or storage.nbytes() != flat.nbytes or not flat.numel():
        raise RuntimeError("only a tensor with a storage of its own can be moved into shared memory")
    # torch has no public access to the descriptor of share_memory_(); tests/communication/test_in_place_shared.py fails
    # if this private one changes.
    try:
        descriptor, _ = storage._share_fd_cpu_()
    except RuntimeError as error:
        for name in re.findall(rf"</(torch_{os.getpid()}_\w+)>", str(error)):
            _remove(f"/dev/shm/{name}")
        raise
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _remove(path: str) -> None:
    """Removes a file that did not fit into memory, and closes the descriptor that torch has left open."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") == path:
                os.close(int(descriptor))
    with contextlib.suppress(OSError):
        os.unlink(path)


def _mapped(path: str, like: Tensor) -> Tensor:
    """Another rank's tensor."""
    return torch.from_file(path, shared=True, size=like.numel(), dtype=like.dtype)
