"""Worker processes of data loaders, and Ctrl-C."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader


def leave_interrupts_to_rank(loader: Any, rank: int) -> None:
    """Makes the workers of a loader ignore Ctrl-C, which a terminal sends to all processes: the rank ends them.

    Forked workers ignore it by the handler of their rank. The workers of a spawned rank are new interpreters, which
    would end in the middle of a batch that the ranks have agreed to finish. The loader's own ``worker_init_fn`` is
    still called; without one, workers are seeded as Lightning does.
    """
    if isinstance(loader, DataLoader) and loader.num_workers and not isinstance(loader.worker_init_fn, _WorkerInit):
        loader.worker_init_fn = _WorkerInit(loader.worker_init_fn, rank)


@contextmanager
def ignoring_ends_of_workers() -> Iterator[None]:
    """Within the block the end of a loader's worker raises nothing in this thread.

    torch raises an error wherever the main thread is, even while that handles an error of the same worker.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        if handler is not None:  # else it was not set by Python
            signal.signal(signal.SIGCHLD, handler)


class _WorkerInit:
    def __init__(self, inner: Callable[[int], Any] | None, rank: int) -> None:
        if inner is None and int(os.environ.get("PL_SEED_WORKERS", 0)):
            inner = functools.partial(pl_worker_init_function, rank=rank)
        self._inner = inner

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._inner is not None:
            self._inner(worker_id)
