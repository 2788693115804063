"""The batches of the members: shares of one global order, dealt anew where the members change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning_multigpu.engine.data_parallel.agreement import LoaderWrapper
from lightning_multigpu.engine.data_parallel.batch_distribution import DealtBatches, ShardedBatchSampler
from lightning_multigpu.strategies.fault_tolerant.members import Members

Batches = ShardedBatchSampler | DealtBatches


class SharedLoader(LoaderWrapper):
    """A loader for validation and tests: each iteration gives this rank its share among the members of then."""

    def __init__(self, loader: Any, batches: Batches, members: Members) -> None:
        self._batches, self._members = batches, members
        self.loader = loader

    def _assign(self) -> None:
        self._batches.num_replicas, self._batches.rank = self._members.size, max(0, self._members.index)

    def __len__(self) -> int:
        self._assign()
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._assign()
        return iter(self.loader)


class DealtLoader(LoaderWrapper):
    """The training loader: an epoch's order is one permutation, of which each global batch is a slice.

    The slice of a batch begins at the cursor, with a batch for each member; the cursor moves on when a batch is
    fetched. Where the members change, batches that were loaded ahead are dropped and loaded anew from the cursor::

        order      0 1 2 3 4 5 | 6 7 8 9 10 11 | 12 13 14 15 | 16 ...      2 samples a batch
        rank 0     0 1         | 6 7           | 12 13       |
        rank 1         2 3     |     8 9       : lost with its batch
        rank 2             4 5 |         10 11 |       14 15 |

    Args:
        limit: as in ``Trainer(limit_train_batches=...)``, for an epoch with all ranks of the job.
        skip: returns the batches that a run which resumes within an epoch leaves out.
        begins: called when an epoch begins.
        weight_of: the weight of this rank's loss, from the batch, its samples and those of the global batch.

    Attributes:
        cursor: samples (of a batch sampler of the user's, batches) of this epoch that were dealt.
        epoch: of the sampler.
        weight: of the present batch's loss.
        samples: of the present batch that count.
    """

    def __init__(
        self,
        loader: Any,
        batches: Batches,
        members: Members,
        *,
        limit: float,
        skip: Callable[[], int],
        begins: Callable[[], None],
        weight_of: Callable[[Any, int, int], float],
    ) -> None:
        self._batches, self._members = batches, members
        self._skip, self._begins, self._weight_of = skip, begins, weight_of
        self.cursor = self.samples = 0
        self.weight = 1.0
        self._dealt_for: int | None = None  # the members' generation to which batches that were loaded ahead belong
        self._a_global_batch = batches.num_replicas * batches.positions_a_rank
        whole = len(batches)
        kept = min(whole, limit) if isinstance(limit, int) else int(whole * limit)
        self._end = min(int(kept) * self._a_global_batch, batches.num_positions())
        self.loader = loader

    @property
    def left(self) -> int:
        """Batches from the cursor to the end of the epoch, with the members of now."""
        return self._number(self._end - self.cursor)

    def __len__(self) -> int:
        """Batches of an epoch, with the members of now."""
        return self._number(self._end)

    def _number(self, positions: int) -> int:
        return -(-positions // (self._members.size * self._batches.positions_a_rank))

    def __iter__(self) -> Iterator[Any]:
        # Lightning makes iterators before it loads a checkpoint: what follows runs at the first `next`.
        self.cursor, self._dealt_for = min(self._end, self._skip() * self._a_global_batch), None
        self._begins()
        batches: Iterator[Any] = iter(())
        while self.cursor < self._end:
            size = self._members.size
            if self._dealt_for != self._members.generation:
                self._dealt_for = self._members.generation
                self._batches.num_replicas, self._batches.rank = size, max(0, self._members.index)
                self._batches.part = self.cursor, self._end
                batches = iter(self.loader)
            batch = next(batches)
            self.cursor = min(self._end, self.cursor + size * self._batches.positions_a_rank)
            self.samples = self._batches.counts.popleft()
            self.weight = self._weight_of(batch, self.samples, self._batches.totals.popleft())
            yield batch

    def move(self, cursor: int, epoch: int) -> None:
        """Goes on where another member is."""
        self.cursor, self._dealt_for = cursor, None
        if hasattr(self._batches.sampler, "set_epoch"):
            self._batches.sampler.set_epoch(epoch)
