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
import warnings
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
        totals: samples of the global batches that these are parts of, kept as ``counts`` are; where that is known.
        skip: batches that the next iteration leaves out without loading them; then 0 again.
        part: the positions in the global order that iterations begin and end at, where it is shared out; None for all.
    """

    def __init__(self, batches: Iterable[list[Any]]) -> None:
        self.batches = batches
        self.counts: deque[int] = deque()
        self.totals: deque[int] = deque()
        self.part: tuple[int, int] | None = None
        self.skip = 0

    @property
    def sampler(self) -> Any:
        """The sampler that receives ``set_epoch``."""
        return getattr(self.batches, "sampler", None)

    def __getattr__(self, name: str) -> Any:
        if name in (
            "batches",
            "state_dict",
            "load_state_dict",
        ):  # a loader with a state would keep that of other batches
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
        limit: of the batches, as in ``Trainer(limit_val_batches=...)``. Where it leaves out the last batch, that takes
            nothing from the batch before.
    """

    def __init__(
        self, batches: BatchSampler, *, num_replicas: int, rank: int, even: bool = False, limit: float = 1.0
    ) -> None:
        super().__init__(batches)
        self.num_replicas = num_replicas
        self.rank = rank
        size = batches.batch_size * num_replicas
        length = len(self.sampler)
        self.even = even and not _leaves_out(limit, length // size if batches.drop_last else -(-length // size))

    @property
    def positions_a_rank(self) -> int:
        """Positions of the global order in a rank's batch: samples."""
        return int(self.batch_size)

    def num_positions(self) -> int:
        """Positions of the global order: samples."""
        return len(self.sampler)

    def __len__(self) -> int:
        return len(self._shares())

    def __iter__(self) -> Iterator[list[int]]:
        self.counts.clear()
        self.totals.clear()
        skip, self.skip = self.skip, 0
        order = _drawn(self.sampler, self.sampler)
        for batch_start, batch_stop, start, stop in self._shares()[skip:]:
            self.counts.append(stop - start)
            self.totals.append(batch_stop - batch_start)
            if start == stop and self.even:
                _warn_of_a_repeat(self.num_replicas)
            yield order[start:stop] or [order[batch_start]]

    def _shares(self) -> list[tuple[int, int, int, int]]:
        """The bounds of each global batch, and of this rank's part of it."""
        begin, end = self.part or (0, len(self.sampler))
        bounds = global_batches(
            end - begin,
            self.batch_size * self.num_replicas,
            num_replicas=self.num_replicas if self.even else 0,
            drop_last=self.drop_last and self.part is None,
        )
        pairs = pairwise(begin + bound for bound in bounds)
        shares = [(a, b, *share(a, b, self.rank, self.num_replicas)) for a, b in pairs]
        if self.even:
            # Outside training a rank may have one batch fewer, but not none at all: it would miss the final reduction.
            shares = [s for s in shares if s[3] > s[2]] or shares[:1]
        return shares


class DealtBatches(CountedBatchSampler):
    """Whole batches dealt to the ranks in turn: those of a batch sampler of the user's, or the items of a sampler.

    Where fewer batches than ranks are left, several ranks share a batch. In training a rank without a part gets the
    batch's first sample, or the item, counted as 0 samples; with ``even`` it has a batch less::

        batches    [0 1] [2 3] | [4 5]        N = 2
        rank 0     [0 1]       | [4]
        rank 1           [2 3] |   [5]

    Args:
        batches: lists of indices, or items of any other type, which count as 1 sample and are not split.
        order: the sampler of the global order, whose seed and epoch every draw depends on.
        even, limit: as in :class:`ShardedBatchSampler`.
    """

    def __init__(
        self, batches: Any, order: Any, *, num_replicas: int, rank: int, even: bool = False, limit: float = 1.0
    ) -> None:
        super().__init__(batches)
        self._order = order
        self.num_replicas = num_replicas
        self.rank = rank
        self.even = even and not _leaves_out(limit, len(self))

    @property
    def positions_a_rank(self) -> int:
        """Positions of the global order in a rank's batch: batches."""
        return 1

    def num_positions(self) -> int:
        """Positions of the global order: batches."""
        return super().__len__()

    def __len__(self) -> int:
        """Batches of a rank; a rank without a part of the last batch may have one less."""
        return -(-super().__len__() // self.num_replicas)

    def __iter__(self) -> Iterator[Any]:
        self.counts.clear()
        self.totals.clear()
        skip, self.skip = self.skip, 0
        drawn = _drawn(self.batches, self._order)
        begin, end = self.part or (0, len(drawn))
        for first in range(begin + skip * self.num_replicas, end, self.num_replicas):
            batches = drawn[first : min(end, first + self.num_replicas)]
            batch, size = self._part(batches)
            if size == 0 and self.even:
                if first > 0:
                    return
                _warn_of_a_repeat(self.num_replicas)
            self.counts.append(size)
            self.totals.append(sum(len(each) if isinstance(each, list) else 1 for each in batches))
            yield batch

    def _part(self, batches: list[Any]) -> tuple[Any, int]:
        """This rank's part of one batch for each rank, or fewer; and its samples."""
        shares = [share(0, self.num_replicas, number, len(batches)) for number in range(len(batches))]
        number, (first, stop) = next((n, s) for n, s in enumerate(shares) if s[0] <= self.rank < s[1])
        batch = batches[number]
        if not isinstance(batch, list):
            return batch, int(self.rank == first)
        start, end = share(0, len(batch), self.rank - first, stop - first)
        return batch[start:end] or batch[:1], end - start


class OnDemandBatchSampler(CountedBatchSampler):
    """Batches of the one global order, each taken by the first worker that asks for it.

    Its length is that of the whole epoch; this worker yields a part of the epoch.

    Args:
        batches: of the one global order, the same on every rank; lists of indices, or items that count as 1 sample.
        order: the sampler of the global order, whose seed and epoch every draw depends on.
        take: returns the number of the next batch; None at the end of the epoch.

    Attributes:
        numbers: the numbers of the batches yielded so far, kept as ``counts`` are.
    """

    def __init__(self, batches: Any, order: Any, take: Callable[[], int | None]) -> None:
        super().__init__(batches)
        self._order = order
        self.numbers: deque[int] = deque()
        self._take = take
        self._following: int | None = None
        self._is_exhausted = False

    def has_next(self) -> bool:
        """Whether this worker has a further batch; asks for one if it has none."""
        return bool(self.numbers) or self._has_following()

    def _has_following(self) -> bool:
        if self._following is None and not self._is_exhausted:
            self._following = self._take()
            self._is_exhausted = self._following is None
        return not self._is_exhausted

    def __iter__(self) -> Iterator[list[int]]:
        self.counts.clear()
        self.numbers.clear()
        self._following, self._is_exhausted = None, False
        drawn = _drawn(self.batches, self._order)
        while self._has_following():
            assert self._following is not None
            number, self._following = self._following, None
            batch = drawn[number]
            self.counts.append(len(batch) if isinstance(batch, list) else 1)
            self.numbers.append(number)
            yield batch


def distribute_batches(
    loader: Any,
    *,
    num_replicas: int,
    rank: int,
    even: bool,
    limit: float = 1.0,
    take: Callable[[], int | None] | None = None,
) -> tuple[Any, CountedBatchSampler | None]:
    """A copy of ``loader`` that counts each batch's samples and, if possible, yields this rank's share of them.

    That is possible if its batch sampler, or its sampler where an item is a whole batch, draws from a
    :class:`~torch.utils.data.DistributedSampler` for these replicas. Any other batch sampler keeps its batches. Loaders
    of iterable datasets, objects that are no DataLoader, and loaders without batches or with a state of their own that
    draw from no such sampler are returned as they are.

    Args:
        loader: the user's loader, or Lightning's copy of it.
        num_replicas: data ranks.
        even, limit: as in :class:`ShardedBatchSampler`.
        take: as in :class:`OnDemandBatchSampler`; None gives this rank a part of each global batch.

    Returns:
        The loader to use, and its batch sampler; None if that is not ours.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader, None
    of_all, order = _of_all_ranks(loader, num_replicas, rank)
    if order is None:
        if loader.batch_sampler is None or hasattr(loader, "state_dict"):
            return loader, None
        distributed = CountedBatchSampler(loader.batch_sampler)
    elif take is not None:
        distributed = OnDemandBatchSampler(of_all, order, take)
    else:
        kwargs: dict[str, Any] = {"num_replicas": num_replicas, "rank": rank, "even": even, "limit": limit}
        is_plain = type(of_all) is BatchSampler
        distributed = ShardedBatchSampler(of_all, **kwargs) if is_plain else DealtBatches(of_all, order, **kwargs)
    clone = copy.copy(loader)
    # A DataLoader forbids to change these, because its iterators would not notice; the copy has no iterator yet.
    if loader.batch_sampler is None:
        object.__setattr__(clone, "sampler", distributed)
    else:
        object.__setattr__(clone, "batch_sampler", distributed)
        object.__setattr__(clone, "sampler", distributed.sampler)
    return clone, distributed


def _of_all_ranks(loader: DataLoader[Any], num_replicas: int, rank: int) -> tuple[Any, Any]:
    """What draws the batches of all ranks, and the sampler of the global order; twice None if nothing can.

    A batch sampler of the user's is copied, with the global order in place of this rank's. One that has drawn from its
    sampler when it was made still gives this rank's samples only, which must not be divided again.
    """

    def is_of_rank(sampler: Any) -> bool:
        return isinstance(sampler, DistributedSampler) and (sampler.num_replicas, sampler.rank) == (num_replicas, rank)

    batches = loader.batch_sampler
    if batches is None:
        sampler: Any = loader.sampler
        whole = _whole(sampler) if is_of_rank(sampler) else None
        return whole, whole
    samplers = {name: value for name, value in getattr(batches, "__dict__", {}).items() if is_of_rank(value)}
    if len({*map(id, samplers.values())}) != 1:
        return None, None
    of_rank = next(iter(samplers.values()))
    order = _whole(of_rank)
    if type(batches) is BatchSampler:
        return BatchSampler(order, batches.batch_size, batches.drop_last), order
    copied = copy.copy(batches)
    vars(copied).update(dict.fromkeys(samplers, order))
    if num_replicas > 1:
        indices = {*_drawn(of_rank, order)}
        if all(index in indices for batch in _drawn(copy.copy(copied), order) for index in batch):
            return None, None
    return copied, order


def _warn_of_a_repeat(num_replicas: int) -> None:
    warnings.warn(
        f"{num_replicas} data ranks evaluate fewer samples, or fewer items that are not divided, than they are: each "
        "needs one, so the first is seen, and counted, more than once; evaluate on fewer devices",
        stacklevel=2,
    )


def _leaves_out(limit: float, num_batches: int) -> bool:
    """Whether a limit, a number of batches or a share of them, leaves out the last of ``num_batches``."""
    return limit < (num_batches if isinstance(limit, int) else 1.0)


def _drawn(items: Iterable[Any], order: Any) -> list[Any]:
    """The indices or batches of an epoch, the same on every rank.

    A sampler of the user's may draw from the global generators, which ranks leave in different states: each epoch has
    a seed of its own there, as Lightning's sampler has one. What never ends is drawn up to its length.
    """
    seed = getattr(order, "seed", 0) + getattr(order, "epoch", 0)
    host = torch.device("cpu")  # to seed the GPUs too would do it alike on all ranks
    with preserved_random_state(host):
        set_random_state(seed, host)
        return list(islice(items, len(items) if isinstance(items, Sized) else None))


def _whole(sampler: DistributedSampler[Any]) -> DistributedSampler[Any]:
    """The same order of samples for one replica: the global order."""
    whole = copy.copy(sampler)
    whole.num_replicas, whole.rank = 1, 0
    assert isinstance(whole.dataset, Sized)
    whole.num_samples = whole.total_size = len(whole.dataset)
    return whole
