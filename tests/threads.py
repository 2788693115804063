"""Ranks that are threads of the test."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """Ranks of one job, each on a thread; one that fails ends the waits of the others."""

    def __init__(self, num: int = 2) -> None:
        self._num = num
        self._meeting = threading.Barrier(num, timeout=30)
        self._told: list[Any] = [None] * num

    def gather(self, rank: int, value: Any) -> list[Any]:
        """The values of all ranks, in their order."""
        self._told[rank] = value
        self._meeting.wait()
        told = list(self._told)
        self._meeting.wait()
        return told

    def run(self, work: Callable[[int], T]) -> list[T]:
        """What the function returns on each rank."""
        with ThreadPoolExecutor(self._num) as pool:
            running = [pool.submit(work, rank) for rank in range(self._num)]
            try:
                return [future.result(timeout=60) for future in running]
            except BaseException:
                self._meeting.abort()
                raise
