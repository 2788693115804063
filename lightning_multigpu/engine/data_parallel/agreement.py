"""Agreement of the data ranks, one batch ahead, on the samples of each rank's next batch.

A rank fetches batch k + 1 before it trains on batch k. What it has to say of it travels with the vote of all ranks on a
stop, which follows each batch, and costs no message of its own::

    rank 0     fetch 0, tell | fetch 1, train 0, vote and tell 1 | fetch 2: end, train 1, vote and tell 2 | stop
    rank 1     fetch 0, tell | fetch 1, train 0, vote and tell 1 | fetch 2,      train 1, vote and tell 2 | stop

Without it a rank that runs out of data leaves the others waiting for its gradients for ever.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.engine.batch_size import leading_size
from lightning_multigpu.engine.data_parallel.batch_distribution import CountedBatchSampler

UnevenInputs = Literal["stop", "join"]
LossReduction = Literal["mean", "sum"] | Callable[[Any], float]

_END = object()


@dataclass(frozen=True)
class Announcement:
    """The announcements of all data ranks for one batch, in rank order.

    Attributes:
        samples: of each data rank's batch; -1 for a data rank without a further batch.
        weights: of each data rank's loss.
        flags: the bits that any rank has set, also one of several ranks that train on the same batch.
        common: a number of every rank, which has to be the same; see :class:`.CommonValues`.
    """

    samples: tuple[int, ...]
    weights: tuple[float, ...]
    flags: int
    common: tuple[float, ...] = ()

    @property
    def exhausted(self) -> list[int]:
        return [rank for rank, samples in enumerate(self.samples) if samples < 0]


class Announcer:
    """Tells all ranks of each rank's next batch.

    Args:
        group: all ranks, on a back end that moves CPU tensors.
        ranks_a_batch: the number of neighbouring ranks that train on the same batch, as one data rank. The first rank
            announces for all of them; the data rank has no further batch as soon as one of its ranks has none.
        flags: returns the bits that this rank shows all ranks.
        common: returns a number that has to be the same on all ranks.
    """

    def __init__(
        self,
        group: MeteredGroup,
        *,
        ranks_a_batch: int = 1,
        flags: Callable[[], int] = lambda: 0,
        common: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._group, self._ranks_a_batch = group, ranks_a_batch
        self._flags, self._common = flags, common
        self._mine: tuple[int, float] | None = None
        self._heard: Announcement | None = None

    def announce(self, samples: int, weight: float) -> None:
        """Keeps what this rank says of its next batch until ranks agree."""
        self._mine = samples, weight

    @property
    def is_due(self) -> bool:
        """Whether there is something to tell; the same on all ranks."""
        return self._mine is not None

    def agree(self, stops: bool = False) -> bool:
        """Tells all ranks of the next batches, and returns whether any rank stops; a collective."""
        assert self._mine is not None
        mine = torch.tensor([*self._mine, self._flags(), self._common(), stops], dtype=torch.float64)
        rows = self._group.all_gather(mine).tolist()
        shares = [rows[first : first + self._ranks_a_batch] for first in range(0, len(rows), self._ranks_a_batch)]
        self._mine, self._heard = (
            None,
            Announcement(
                samples=tuple(-1 if any(row[0] < 0 for row in share) else int(share[0][0]) for share in shares),
                weights=tuple(share[0][1] for share in shares),
                flags=functools.reduce(operator.or_, (int(row[2]) for row in rows)),
                common=tuple(row[3] for row in rows),
            ),
        )
        return any(row[4] for row in rows)

    def collect(self) -> Announcement:
        """What all ranks have said of the batch; a collective if they have not voted since."""
        if self._heard is None:
            self.agree()
        heard, self._heard = self._heard, None
        assert heard is not None
        return heard

    def drop(self) -> None:
        """Forgets a batch that nobody uses because the epoch has ended."""
        self._mine = self._heard = None


class LoaderWrapper:
    """Wraps a loader and shows its attributes: Lightning seeds and ends the workers of a loader through them.

    The position that a loader saves by itself is not shown: it is that of the batch fetched ahead, on one rank. A run
    that resumes leaves batches out. ``loader`` is assigned after all other attributes.
    """

    loader: Any

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "__setstate__", "state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "loader" in self.__dict__ and name not in self.__dict__ and hasattr(self.loader, name):
            setattr(self.loader, name, value)
        else:
            super().__setattr__(name, value)


class ContinuedLoader(LoaderWrapper):
    """Iterates over a loader, without the batches of the epoch that were trained on before the run was resumed.

    Nothing is loaded before the first ``next``: Lightning makes iterators before a checkpoint is loaded.

    Args:
        loader: of whole batches, or of a rank's own.
        batches: the loader's batch sampler, if it is ours: it does not load the batches that are left out.
        skip: returns how many batches to leave out; called at the start of each iteration.
    """

    def __init__(
        self, loader: Any, batches: CountedBatchSampler | None = None, skip: Callable[[], int] = lambda: 0
    ) -> None:
        self._batches, self._skip = batches, skip
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        skip = self._skip()
        if self._batches is not None:
            self._batches.skip, skip = skip, 0
        yield from islice(self.loader, skip, None)


class AgreedLoader(ContinuedLoader):
    """Iterates over a rank's loader for as long as all ranks agree to.

    Args:
        batches, skip: as in :class:`ContinuedLoader`.
        uneven_inputs: ``"stop"``: all ranks stop as soon as one has no batch; ``"join"``: all go on until no rank has
            one, and a rank without data repeats its last batch with weight 0.
        loss_reduction: the weight of a rank's loss: its samples (``"mean"``), 1 (``"sum"``), or the function's value
            for the batch.
        on_agreed: called on all ranks, between the same two batches, with the announcements of the next one.
        on_uneven: called with a message, once an iteration, when ranks run out of data at different times.
        length: batches of an iteration; None if a rank's loader has no length.

    Raises:
        ValueError: when iterating with ``"join"``: a rank has not a single batch to repeat.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        announcer: Announcer,
        *,
        batches: CountedBatchSampler | None = None,
        uneven_inputs: UnevenInputs = "stop",
        loss_reduction: LossReduction = "mean",
        skip: Callable[[], int] = lambda: 0,
        on_agreed: Callable[[Announcement], None] = lambda announcement: None,
        on_uneven: Callable[[str], None] = lambda message: None,
        length: int | None = None,
    ) -> None:
        self._announcer = announcer
        self._uneven_inputs = uneven_inputs
        self._loss_reduction = loss_reduction
        self._on_agreed = on_agreed
        self._on_uneven = on_uneven
        self._length = length
        self.announced: deque[Announcement] = deque()
        super().__init__(loader, batches, skip)

    def __len__(self) -> int:
        """Batches of an iteration, the same on every rank.

        Raises:
            TypeError: some rank's loader has no length.
        """
        if self._length is None:
            raise TypeError(f"{type(self.loader).__name__} has no length on some rank")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self._announcer.drop()
        self.announced.clear()
        batches = super().__iter__()
        batch = self._announce_next(batches)
        last: Any = _END
        warned = False
        while True:
            announcement = self._announcer.collect()
            self._on_agreed(announcement)
            exhausted = announcement.exhausted
            everybody = len(exhausted) == len(announcement.samples)
            if exhausted and not everybody and not warned:
                warned = True
                self._on_uneven(_uneven_message(exhausted, self._uneven_inputs))
            if everybody or (exhausted and self._uneven_inputs == "stop"):
                return
            if batch is _END:
                if last is _END:
                    raise ValueError(
                        f"rank {dist.get_rank()} has no batch at all, so it cannot go on with weight 0: load at "
                        "least one batch on every rank, or use uneven_inputs='stop'"
                    )
                batch = last
            self.announced.append(announcement)
            # The next batch is fetched before this one is yielded: all ranks hear of it when they vote after this step.
            last, batch = batch, self._announce_next(batches)
            yield last

    def _announce_next(self, batches: Iterator[Any]) -> Any:
        batch = next(batches, _END)
        if batch is _END:
            samples, weight = -1, 0.0
        else:
            samples = self._count(batch)
            weight = self._weight(batch, samples)
        self._announcer.announce(samples, weight)
        return batch

    def _count(self, batch: Any) -> int:
        if self._batches is not None:
            return self._batches.counts.popleft()
        return counted_samples(batch, limit=getattr(self.loader, "batch_size", None))

    def _weight(self, batch: Any, samples: int) -> float:
        if callable(self._loss_reduction):
            return float(self._loss_reduction(batch)) if samples else 0.0
        return float(samples) if self._loss_reduction == "mean" else float(samples > 0)


def loss_scale(announcement: Announcement, rank: int, loss_reduction: LossReduction) -> float:
    """The factor of this rank's loss that makes the plain average of gradients over ranks correct.

    With weights w, rank r's gradient has to count for w_r / sum(w); the average divides by N, so the factor is
    N w_r / sum(w). For a loss that is a sum over samples, gradients have to be added: the factor is N.
    """
    weights = announcement.weights
    if loss_reduction == "sum":
        return len(weights) * weights[rank]
    total = sum(weights)
    if total == 0:
        return 1.0
    return len(weights) * weights[rank] / total


def counted_samples(batch: Any, *, limit: int | None) -> int:
    """Samples of a batch from a batch sampler that is not ours: the first dimension of its first tensor.

    If that is more than ``limit`` (the loader's batch size), or there is no tensor, the batch counts for 1 sample, as
    all such batches do.
    """
    size = leading_size(batch)
    return size if size is not None and limit is not None and 0 < size <= limit else 1


def full_batch_size(loader: Any) -> int | None:
    """Samples of a loader's full batches on this rank; None if it is unknown before they are drawn."""
    if isinstance(loader, LoaderWrapper):
        loader = loader.loader
    batches = loader.batch_sampler if isinstance(loader, DataLoader) else None
    if isinstance(batches, CountedBatchSampler):
        batches = batches.batches
    return batches.batch_size if type(batches) is BatchSampler else None


def agreed_length(loader: Iterable[Any], group: MeteredGroup, uneven_inputs: UnevenInputs) -> int | None:
    """Batches that all ranks will take from their loaders, or None where some rank's has no length. A collective."""
    try:
        mine = len(loader) if isinstance(loader, Sized) else -1
    except TypeError:
        mine = -1
    known = group.all_gather(torch.tensor(mine)).tolist()
    if min(known) < 0:
        return None
    return int(min(known) if uneven_inputs == "stop" else max(known))


def _uneven_message(exhausted: list[int], uneven_inputs: UnevenInputs) -> str:
    who = f"rank {exhausted[0]} has" if len(exhausted) == 1 else f"ranks {', '.join(map(str, exhausted))} have"
    if uneven_inputs == "stop":
        return (
            f"{who} no more training batches in this epoch, so all ranks stop together here. With "
            "uneven_inputs='join' the others go on, and a rank without data has weight 0."
        )
    return f"{who} no more training batches in this epoch; the others go on (uneven_inputs='join')."
