"""Distribution of an epoch's batches to workers on demand, so that fast workers train on more batches.

Each batch goes to one worker. When a worker is lost, the batches that it has not trained on go to other workers.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field


@dataclass(eq=False)
class _Epoch:
    """The ``num_batches`` batches of an epoch.

    ``following`` is the next new batch, ``returned`` has batches of lost workers, which go first, and ``assigned`` the
    batches that each worker has and has not trained on.
    """

    num_batches: int
    following: int = 0
    returned: deque[int] = field(default_factory=deque)
    assigned: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))


class BatchQueue:
    """Distributes the batches of all epochs of a run.

    Worker 0 gets one batch of each epoch at least, since it validates after its last batch.

    Attributes:
        left: how many further batches the run takes; None for any number.
    """

    def __init__(self) -> None:
        self._epochs: dict[int, _Epoch] = {}
        self._epoch_of: dict[int, int] = {}
        self._first_open = 0
        self.left: int | None = None
        self._last: int | None = None

    def end_with(self, epoch: int) -> None:
        """Ends the run with an epoch; -1 for no further batch at all."""
        self._last = epoch

    def is_over(self, worker: int, epoch: int) -> bool:
        """Whether the worker gets no more batches of an epoch, nor of any later one."""
        if self._last is not None and epoch > self._last:
            return True
        return self._has_reached_limit(worker) and not any(
            batches.returned for n, batches in self._epochs.items() if n >= epoch
        )

    def _has_reached_limit(self, worker: int) -> bool:
        """Whether no further batch is left, but for the first one of worker 0 in each epoch."""
        if self.left is None:
            return False
        reserved = sum(
            0 not in batches.assigned and batches.following < batches.num_batches
            for batches in self._epochs.values()
            if worker != 0
        )
        return self.left <= reserved

    def may_return(self, worker: int, epoch: int) -> bool:
        """Whether other workers have batches that this worker would get if they were lost.

        The batches are of this worker's epoch, or of a later one if the run takes no further batches.
        """
        return any(
            any(numbers for other, numbers in batches.assigned.items() if other != worker)
            for number, batches in self._epochs.items()
            if number == epoch or (number > epoch and self.left == 0)
        )

    def next(self, worker: int, epoch: int, *, first: int, num_batches: int) -> int | None:
        """The number of the next batch for a worker; None if the epoch, or the run, has no more.

        ``first`` is the first batch that is left of the epoch, if an earlier run has trained on a part of it.
        """
        if self.is_over(worker, epoch):
            return None
        self._epoch_of[worker] = max(epoch, self._epoch_of.get(worker, 0))
        slowest = min(self._epoch_of.values()) if 0 in self._epoch_of else 0
        if slowest > self._first_open:  # earlier epochs, which worker 0 and all that have asked for batches have left
            self._first_open = slowest
            self._epochs = {n: e for n, e in self._epochs.items() if n >= slowest or any(e.assigned.values())}
        if epoch < self._first_open:
            return None
        batches = self._epochs.setdefault(epoch, _Epoch(num_batches))
        batches.following = max(batches.following, first)
        if batches.returned:
            number = batches.returned.popleft()
        else:
            last = num_batches - (worker != 0 and 0 not in batches.assigned)
            if batches.following >= last or self._has_reached_limit(worker):
                return None
            number = batches.following
            batches.following += 1
            if self.left is not None:
                self.left -= 1
        batches.assigned[worker].add(number)
        return number

    def trained(self, worker: int, epoch: int, number: int) -> None:
        """Notes that a worker has trained on a batch."""
        if epoch in self._epochs:
            self._epochs[epoch].assigned[worker].discard(number)

    def give_back(self, worker: int, epoch: int) -> None:
        """Returns a worker's batches of an epoch, so that other workers get them."""
        if epoch in self._epochs:
            batches = self._epochs[epoch]
            batches.returned.extend(sorted(batches.assigned[worker]))
            batches.assigned[worker].clear()

    def lose(self, worker: int) -> int:
        """Returns the batches of a lost worker, so that other workers get them; their number."""
        self._epoch_of.pop(worker, None)
        number = 0
        for batches in self._epochs.values():
            numbers = sorted(batches.assigned.pop(worker, ()))
            batches.returned.extend(numbers)
            number += len(numbers)
        return number
