"""A background thread that takes a sample now and then."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Sample = dict[str, float]


class BackgroundSampler:
    """Calls a function every ``interval_s`` seconds in a thread of its own and keeps what it returned.

    The thread is a daemon, so that it never keeps a process alive; :meth:`stop` ends and joins it. An exception ends
    sampling and reaches the caller from :meth:`take` or :meth:`stop`.

    Args:
        sample: takes one sample; never called by two threads at once.
        interval_s: seconds from one sample to the next.

    Raises:
        ValueError: ``interval_s`` is not above 0.
    """

    def __init__(self, sample: Callable[[], Sample], *, interval_s: float) -> None:
        if not interval_s > 0:
            raise ValueError(f"interval_s={interval_s}: the time between two samples must be above 0 seconds")
        self._sample = sample
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._samples: deque[Sample] = deque()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="device-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self, *, at_least_one: bool = False) -> list[Sample]:
        """The samples since the last call, oldest first; ``at_least_one`` takes one now if there are none."""
        with self._lock:
            if at_least_one and not self._samples and self._error is None:
                self._take_one()
            self._raise_error()
            samples = list(self._samples)
            self._samples.clear()
        return samples

    def stop(self) -> None:
        """Ends the thread; may be called more than once."""
        self._stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            with self._lock:
                if self._error is not None or self._stopping.is_set():
                    return
                self._take_one()

    def _take_one(self) -> None:
        try:
            self._samples.append(self._sample())
        except Exception as error:
            self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            self._stopping.set()
            raise error
