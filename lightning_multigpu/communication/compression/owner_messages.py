"""Messages between ranks that each own a part of a sum.

Every rank sends its values of a part to the part's owner; the owner sums them, and sends the sum to all. With N = 3::

                rank 0 owns a     rank 1 owns b     rank 2 owns c
    start       a0 b0 c0          a1 b1 c1          a2 b2 c2
    TO_OWNER    b0 -> 1, c0 -> 2  a1 -> 0, c1 -> 2  a2 -> 0, b2 -> 1
    holds       A                 B                 C
    FROM_OWNER  A -> 1, 2         B -> 0, 2         C -> 0, 1

A rank sends as much as in a ring, 2(N-1)/N of the tensor, but values are encoded only twice, whatever N is.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

# Messages with one tag between two ranks arrive in the order of sending. The ring uses higher tags.
TO_OWNER = 1
FROM_OWNER = 2
SECOND_TO_OWNER = 3
SECOND_FROM_OWNER = 4


class Messages:
    """Point-to-point messages over a process group.

    Args:
        group: a process group whose back end sends CPU tensors point to point (gloo, mpi).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._ranks = dist.get_process_group_ranks(group)

    @property
    def peers(self) -> list[int]:
        """The other ranks of the group, the next one first, so that not all send to the same rank at once."""
        return [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]

    def send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Starts to send; the tensor must not change until the work is done."""
        work = dist.isend(tensor, self._ranks[peer], group=self.group, tag=tag)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Starts to receive; the message is in the tensor when the work is done."""
        work = dist.irecv(tensor, self._ranks[peer], group=self.group, tag=tag)
        assert work is not None
        return work


def wait_all(works: Iterable[dist.Work]) -> None:
    """Waits for all works."""
    for work in works:
        work.wait()
