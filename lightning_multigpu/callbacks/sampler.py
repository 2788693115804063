"""A background thread that takes samples at intervals."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Sample = dict[str, float]

_STOP_TIMEOUT_S = 5.0


class BackgroundSampler:
    """Calls a function every ``interval_s`` seconds in a thread and keeps the results.

    The thread is a daemon, so that it never keeps a process alive; :meth:`stop` ends and joins it. An exception ends
    sampling and reaches the caller from the next :meth:`take`.

    Args:
        sample: takes one sample; never called by two threads at once.
        interval_s: seconds from one sample to the next, above 0.
    """

    def __init__(self, sample: Callable[[], Sample], *, interval_s: float) -> None:
        self._sample = sample
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._sampling = threading.Lock()
        self._samples: deque[Sample] = deque()
        self._any_taken = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="device-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self, *, first_now: bool = False) -> list[Sample]:
        """The samples since the last call, oldest first.

        Does not wait for the thread, except with ``first_now``, which takes a sample at once if there was none ever.
        """
        if first_now and not self._any_taken:
            self._take_one()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        # The other thread only appends, so what is there now can be taken without a lock.
        return [self._samples.popleft() for _ in range(len(self._samples))]

    def stop(self) -> None:
        """Ends the thread; may be called more than once.

        A thread that a driver does not give back within 5 s is left to end with the process: a sensor that hangs must
        not hang the training.
        """
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_STOP_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self._take_one()

    def _take_one(self) -> None:
        with self._sampling:
            try:
                self._samples.append(self._sample())
                self._any_taken = True
            except Exception as error:
                self._error = error
                self._stopping.set()
