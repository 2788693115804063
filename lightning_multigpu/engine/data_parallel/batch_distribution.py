"""Distribution of each global batch over the data ranks, so that N ranks see the samples of one device.

With a batch size of b a rank, global batch k holds positions k N b to (k + 1) N b of the one global order, and each
rank takes its part of it. No sample is repeated or left out. If N does not divide the last batch, some ranks have one
sample more than others, and gradients are weighted by samples::

    order      0 1 2 3 | 4 5 6 7 | 8 9 10        N = 2, b = 2
    rank 0     0 1     | 4 5     | 8 9
    rank 1         2 3 |     6 7 |     10
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice, pairwise
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from lightning_multigpu.engine.step_state import preserved_random_state, set_random_state


def share(start: int, stop: int, rank: int, num_replicas: int) -> tuple[int, int]:
    """The part of positions ``[start, stop)`` that ``rank`` takes; parts differ by one at most, larger ones first."""
    size, larger = divmod(stop - start, num_replicas)
    first = start + rank * size + min(rank, larger)
    return first, first + size + (rank < larger)


def global_batches(length: int, global_batch_size: int, *, num_replicas: int, drop_last: bool) -> list[int]:
    """Boundaries of the global batches: batch k holds positions ``[result[k], result[k + 1])``.

    A last batch with fewer samples than ranks takes some from the batch before, if that one keeps a sample a rank too:
    a rank without a sample has nothing to compute.
    """
    bounds = list(range(0, length + 1, global_batch_size))
    rest = length - bounds[-1]
    if drop_last or rest == 0:
        return bounds
    if rest < num_replicas and len(bounds) > 1 and global_batch_size + rest >= 2 * num_replicas:
        bounds[-1] = length - num_replicas
    return [*bounds, length]


class CountedBatchSampler(Sampler[list[int]]):
    """A batch sampler that counts the samples of its batches, and can begin in the middle of an epoch.

    Attributes:
        counts: samples of the batches yielded so far, oldest first, but for counts already taken. A loader with workers
            draws batches ahead of time; the receiver of a batch takes its count from the left.
        skip: batches that the next iteration leaves out without loading them; then 0 again.
    """

    def __init__(self, batches: Iterable[list[Any]]) -> None:
        self.batches = batches
        self.counts: deque[int] = deque()
        self.skip = 0

    @property
    def sampler(self) -> Any:
        """The sampler that receives ``set_epoch``."""
        return getattr(self.batches, "sampler", None)

    def __getattr__(self, name: str) -> Any:
        if name == "batches":
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __len__(self) -> int:
        assert isinstance(self.batches, Sized)
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        self.counts.clear()
        skip, self.skip = self.skip, 0
        for batch in islice(self.batches, skip, None):
            self.counts.append(len(batch))
            yield batch


class ShardedBatchSampler(CountedBatchSampler):
    """This rank's part of every global batch.

    A rank whose part is empty gets the batch's first sample, counted as 0 samples.

    Args:
        batches: its sampler gives the one global order, the same on every rank; its ``batch_size`` counts the samples
            of a rank in a batch; with ``drop_last`` a last global batch that is not full is left out.
        num_replicas: data ranks.
        even: let a last batch with too few samples for all ranks take some from the batch before it. This is for use
            outside training, where the composition of a batch does not matter.
    """

    def __init__(self, batches: BatchSampler, *, num_replicas: int, rank: int, even: bool = False) -> None:
        super().__init__(batches)
        self.num_replicas = num_replicas
        self.rank = rank
        self.even = even

    def __len__(self) -> int:
        return len(self._shares())

    def __iter__(self) -> Iterator[list[int]]:
        self.counts.clear()
        skip, self.skip = self.skip, 0
        order = _drawn(self.sampler)
        for batch_start, start, stop in self._shares()[skip:]:
            self.counts.append(stop - start)
            yield order[start:stop] or [order[batch_start]]

    def _shares(self) -> list[tuple[int, int, int]]:
        bounds = global_batches(
            len(self.sampler),
            self.batch_size * self.num_replicas,
            num_replicas=self.num_replicas if self.even else 0,
            drop_last=self.drop_last,
        )
        shares = [(a, *share(a, b, self.rank, self.num_replicas)) for a, b in pairwise(bounds)]
        if self.even:
            # Outside training a rank may have one batch fewer, but not none at all: it would miss the final reduction.
            shares = [s for s in shares if s[2] > s[1]] or shares[:1]
        return shares


class OnDemandBatchSampler(CountedBatchSampler):
    """Batches of the one global order, each taken by the first worker that asks for it.

    Its length is that of the whole epoch; this worker yields a part of the epoch.

    Args:
        batches: of the one global order, the same on every rank.
        take: returns the numbers of the next batches, which make one update; no number at the end of the epoch.

    Attributes:
        numbers: the numbers of the batches yielded so far, kept as ``counts`` are.
    """

    def __init__(self, batches: BatchSampler, take: Callable[[], Iterable[int]]) -> None:
        super().__init__(batches)
        self.numbers: deque[int] = deque()
        self._take = take
        self._following: deque[int] = deque()
        self._is_exhausted = False

    def has_next(self) -> bool:
        """Whether this worker has a further batch; asks for one if it has none."""
        return bool(self.numbers) or self._has_following()

    @property
    def lacks_next(self) -> bool:
        """Whether this worker has to ask for its next batch."""
        return not (self.numbers or self._following or self._is_exhausted)

    def _has_following(self) -> bool:
        if not self._following and not self._is_exhausted:
            self._following.extend(self._take())
            self._is_exhausted = not self._following
        return bool(self._following)

    def __iter__(self) -> Iterator[list[int]]:
        self.counts.clear()
        self.numbers.clear()
        self._following.clear()
        self._is_exhausted = False
        order = _drawn(self.sampler)
        while self._has_following():
            number = self._following.popleft()
            batch = order[number * self.batch_size : (number + 1) * self.batch_size]
            self.counts.append(len(batch))
            self.numbers.append(number)
            yield batch


def distribute_batches(
    loader: Any, *, num_replicas: int, rank: int, even: bool, take: Callable[[], Iterable[int]] | None = None
) -> tuple[Any, CountedBatchSampler | None]:
    """A copy of ``loader`` that counts each batch's samples and, if possible, yields this rank's share of them.

    That is possible if it has a :class:`~torch.utils.data.DistributedSampler` for these replicas and torch's own batch
    sampler. Any other batch sampler keeps its batches. Loaders of iterable datasets, loaders without batches, loaders
    that keep their own state, and objects that are no DataLoader are returned as they are.

    Args:
        loader: the user's loader, or Lightning's copy of it.
        num_replicas: data ranks.
        even: as in :class:`ShardedBatchSampler`.
        take: as in :class:`OnDemandBatchSampler`; None gives this rank a part of each global batch.

    Returns:
        The loader to use, and its batch sampler; None if that is not ours.
    """
    if (
        not isinstance(loader, DataLoader)
        or loader.batch_sampler is None
        or isinstance(loader.dataset, IterableDataset)
        or hasattr(loader, "state_dict")
    ):
        return loader, None
    batches, sampler = loader.batch_sampler, loader.sampler
    distributed: CountedBatchSampler = CountedBatchSampler(batches)
    if (
        type(batches) is BatchSampler
        and isinstance(sampler, DistributedSampler)
        and (sampler.num_replicas, sampler.rank) == (num_replicas, rank)
    ):
        of_all = BatchSampler(_whole(sampler), batches.batch_size, batches.drop_last)
        if take is None:
            distributed = ShardedBatchSampler(of_all, num_replicas=num_replicas, rank=rank, even=even)
        else:
            distributed = OnDemandBatchSampler(of_all, take)
    clone = copy.copy(loader)
    # A DataLoader forbids to change these, because its iterators would not notice; the copy has no iterator yet.
    object.__setattr__(clone, "batch_sampler", distributed)
    object.__setattr__(clone, "sampler", distributed.sampler)
    return clone, distributed


def _drawn(order: Sampler[int]) -> list[int]:
    """The indices of an epoch, the same on every rank.

    A sampler of the user's may draw from the global generators, which ranks leave in different states: each epoch has
    a seed of its own there, as Lightning's sampler has one.
    """
    seed = getattr(order, "seed", 0) + getattr(order, "epoch", 0)
    host = torch.device("cpu")  # to seed the GPUs too would do it alike on all ranks
    with preserved_random_state(host):
        set_random_state(seed, host)
        return list(order)


def _whole(sampler: DistributedSampler[Any]) -> DistributedSampler[Any]:
    """The same order of samples for one replica: the global order."""
    whole = copy.copy(sampler)
    whole.num_replicas, whole.rank = 1, 0
    assert isinstance(whole.dataset, Sized)
    whole.num_samples = whole.total_size = len(whole.dataset)
    return whole
