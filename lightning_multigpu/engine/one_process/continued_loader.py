"""A training loader that can go on in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from itertools import islice
from typing import Any

from lightning_multigpu.engine.data_parallel.agreement import LoaderWrapper
from lightning_multigpu.engine.data_parallel.batch_distribution import distribute_batches


class ContinuedLoader(LoaderWrapper):
    """Iterates over a loader, without the batches of the epoch that were trained on before the run was resumed.

    Args:
        loader: of whole batches. A DataLoader with a batch sampler does not load the batches that are left out.
        skip: returns how many batches to leave out; called at the start of each iteration.
    """

    def __init__(self, loader: Any, skip: Callable[[], int]) -> None:
        self._skip = skip
        loader, self._batches = distribute_batches(loader, num_replicas=1, rank=0, even=False)
        self.loader = loader

    def __len__(self) -> int:
        if not isinstance(self.loader, Sized):
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        skip = self._skip()
        if self._batches is not None:
            self._batches.skip, skip = skip, 0
        yield from islice(self.loader, skip, None)
