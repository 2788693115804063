"""How far the asynchronous workers of a parameter server may be apart.

Source: Q. Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS 2013.
"""

from __future__ import annotations

from collections.abc import Iterable


class Clocks:
    """The steps of each worker, by which workers that are too far ahead wait.

    Args:
        workers: that are there from the beginning.
        max_staleness: how many steps a worker may be ahead of the slowest one; None for any number.
    """

    def __init__(self, workers: Iterable[int], max_staleness: int | None) -> None:
        self._steps = dict.fromkeys(workers, 0)
        self._max_staleness = max_staleness

    def leaves(self, worker: int) -> None:
        """Nobody waits for the worker until it completes a step again."""
        self._steps.pop(worker, None)

    def completes(self, worker: int) -> None:
        """The worker has completed a step; one that comes back begins beside the slowest of the others."""
        self._steps.setdefault(worker, min(self._steps.values(), default=0))
        self._steps[worker] += 1

    def may_go_on(self, worker: int) -> bool:
        """Whether the worker may begin its next step when the present one is done."""
        if self._max_staleness is None or worker not in self._steps or len(self._steps) == 1:
            return True
        slowest = min(steps for other, steps in self._steps.items() if other != worker)
        return self._steps[worker] + 1 - slowest <= self._max_staleness
