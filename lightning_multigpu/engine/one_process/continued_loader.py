"""A training loader that can go on in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from itertools import islice
from typing import Any

from lightning_multigpu.engine.data_parallel.agreement import LoaderWrapper
from lightning_multigpu.engine.data_parallel.batch_distribution import distribute_batches


class ContinuedLoader(LoaderWrapper):
    """Iterates over a loader, without the batches of the epoch that have been trained on before.

    Args:
        loader: of the whole batches. Of a DataLoader with a batch sampler, the batches left out are not loaded.
        skip: asked at the start of each iteration how many batches to leave out.
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
