"""Distribution of an epoch's batches to workers on demand, so that fast workers train on more batches.

Each batch goes to one worker. When a worker is lost, the batches that it has not trained on go to other workers.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field


@dataclass(eq=False)
class _Epoch:
    """The next new batch, batches of lost workers, which go first, and what each worker has and has not trained on."""

    following: int
    returned: deque[int] = field(default_factory=deque)
    assigned: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))


class BatchQueue:
    """Distributes the batches of all epochs of a run.

    Worker 0 gets one batch of each epoch at least, since it validates after its last batch.
    """

    def __init__(self) -> None:
        self._epochs: dict[int, _Epoch] = {}

    def next(self, worker: int, epoch: int, first: int, num_batches: int) -> int | None:
        """The number of the next batch for a worker; None if the epoch has no more.

        ``first`` is the first batch that is left of the epoch, if an earlier run has trained on a part of it.
        """
        batches = self._epochs.setdefault(epoch, _Epoch(first))
        if batches.returned:
            number = batches.returned.popleft()
        elif batches.following < num_batches - (worker != 0 and 0 not in batches.assigned):
            number = batches.following
            batches.following += 1
        else:
            return None
        batches.assigned[worker].add(number)
        return number

    def others_have(self, worker: int, epoch: int) -> bool:
        """Whether other workers have batches of the epoch, which this worker would get if they were lost."""
        assigned = self._epochs[epoch].assigned if epoch in self._epochs else {}
        return any(numbers for other, numbers in assigned.items() if other != worker)

    def trained(self, worker: int, epoch: int, number: int) -> None:
        """Notes that a worker has trained on a batch."""
        self._epochs[epoch].assigned[worker].discard(number)

    def give_back(self, worker: int, epoch: int) -> int:
        """Returns a worker's batches of an epoch, so that other workers get them; their number."""
        if epoch not in self._epochs:
            return 0
        numbers = sorted(self._epochs[epoch].assigned[worker])
        self._epochs[epoch].assigned[worker].clear()
        self._epochs[epoch].returned.extend(numbers)
        return len(numbers)

    def lose(self, worker: int) -> int:
        """Returns the batches of a lost worker, so that other workers get them; their number."""
        return sum(self.give_back(worker, epoch) for epoch in self._epochs)
