"""The batches of a data rank: its share of the samples, and the agreement of the ranks on each training batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Sized
from types import NoneType
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_multigpu._lightning_internals import forget_loader_states, given_loaders, places_sampler
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.engine.data_parallel.agreement import (
    AgreedLoader,
    Announcement,
    Announcer,
    LossReduction,
    UnevenInputs,
    agreed_length,
    loss_scale,
)
from lightning_multigpu.engine.data_parallel.batch_distribution import CountedBatchSampler, distribute_batches
from lightning_multigpu.job.loader_workers import leave_interrupts_to_rank
from lightning_multigpu.job.run_signals import RunSignals

if TYPE_CHECKING:
    import lightning.pytorch as pl


class BatchFeed:
    """Distributes batches over the data ranks, agrees on and weights each training batch, and resumes an epoch.

    Attributes:
        loss_scale: the factor of this rank's loss of the present batch.
        counts: False if the present batch is a repeated one, of weight 0.
    """

    def __init__(self, uneven_inputs: UnevenInputs, loss_reduction: LossReduction, signals: RunSignals) -> None:
        self.loss_scale = 1.0
        self.counts = True
        self.uneven_inputs: UnevenInputs = uneven_inputs
        self.loss_reduction: LossReduction = loss_reduction
        self._signals = signals
        self.announcer: Announcer | None = None  # in training

    def distribute(
        self,
        loader: Any,
        trainer: pl.Trainer,
        *,
        rank: int,
        num_replicas: int,
        group: MeteredGroup,
        ranks_a_batch: int,
        common: Callable[[], float],
        on_agreed: Callable[[Announcement], None],
    ) -> Any:
        """The loader that rank ``rank`` of ``num_replicas`` data ranks iterates over; a collective in training.

        In training all ranks agree on each batch over ``group``, also the ``ranks_a_batch`` of each data rank;
        ``common`` is that of :class:`.Announcer`, and ``on_agreed`` of :class:`.AgreedLoader`. Prediction keeps
        Lightning's own sampler, which repeats nothing and keeps the indices for writers.
        """
        if trainer.predicting:
            distributed: Any = loader
            batches = None
        else:
            distributed, batches = distribute_batches(
                loader,
                num_replicas=num_replicas,
                rank=rank,
                even=not trainer.training,
                limit=evaluation_limit(trainer),
            )
            warn_of_repeats(trainer, loader, batches, num_replicas)
        if self._signals.holds_interrupts:
            leave_interrupts_to_rank(distributed, trainer.global_rank)
        if not trainer.training:
            return distributed
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress

        def agreed(announcement: Announcement) -> None:
            # Gradients that are being accumulated are not part of a checkpoint.
            may_act = progress.current.processed % trainer.accumulate_grad_batches == 0
            self._signals.agree(announcement.flags, may_act=may_act)
            on_agreed(announcement)

        forget_loader_states(trainer)
        self.announcer = Announcer(
            group, ranks_a_batch=ranks_a_batch, flags=lambda: self._signals.received, common=common
        )
        return AgreedLoader(
            distributed,
            self.announcer,
            batches=batches,
            uneven_inputs=self.uneven_inputs,
            loss_reduction=self.loss_reduction,
            skip=lambda: batches_to_skip(trainer),
            on_agreed=agreed,
            on_uneven=rank_zero_warn,
            length=agreed_length(distributed, group, self.uneven_inputs),
        )

    def start_batch(self, trainer: pl.Trainer, rank: int) -> None:
        """Takes the ranks' announcement of the next training batch."""
        self.loss_scale, self.counts = 1.0, True
        loader = trainer.train_dataloader
        if isinstance(loader, AgreedLoader) and loader.announced:
            announcement = loader.announced.popleft()
            self.loss_scale = loss_scale(announcement, rank, self.loss_reduction)
            self.counts = announcement.samples[rank] > 0


def evaluation_limit(trainer: pl.Trainer) -> float:
    """The batches, or the share of them, that validation or a test is limited to."""
    return trainer.limit_test_batches if trainer.testing else trainer.limit_val_batches


def warn_of_repeats(trainer: pl.Trainer, loader: Any, batches: CountedBatchSampler | None, num_replicas: int) -> None:
    """Says that ranks see some samples twice, where Lightning's sampler is in a place that this pack cannot reach."""
    if (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and places_sampler(trainer)
        and type(batches) in (CountedBatchSampler, NoneType)
        and not isinstance(loader.sampler, DistributedSampler)
        and isinstance(loader.dataset, Sized)
        and len(loader.dataset) % num_replicas
    ):
        kind = type(loader.batch_sampler).__name__
        rank_zero_warn(
            f"{kind} draws from its sampler when it is made, or keeps it out of its attributes: the ranks see up to "
            f"{num_replicas - 1} of {len(loader.dataset)} samples twice. Keep the sampler as an attribute and draw "
            "from it in __iter__, or pass Trainer(use_distributed_sampler=False) and each rank's batches"
        )


def check_loaders(trainer: pl.Trainer) -> None:
    """Raises ValueError for a loader whose batch sampler, or the sampler of that, Lightning would leave out."""
    for loader in given_loaders(trainer):
        kind = type(loader.batch_sampler)
        if loader.batch_size is None and isinstance(loader.batch_sampler, BatchSampler):
            own = loader.batch_sampler.sampler
            if kind is BatchSampler and not trainer.predicting:
                raise ValueError(
                    "Lightning would leave out DataLoader(batch_sampler=BatchSampler(...)), and its batch size: pass "
                    f"batch_size={loader.batch_sampler.batch_size}, drop_last={loader.batch_sampler.drop_last} and the "
                    "sampler to the DataLoader itself"
                )
            if not isinstance(own, (RandomSampler, SequentialSampler, DistributedSampler)):
                raise ValueError(
                    f"Lightning would put a sampler of all samples in the place of the {type(own).__name__} of "
                    f"{kind.__name__}: give the dataset only the samples to draw, or pass "
                    "Trainer(use_distributed_sampler=False) and a batch sampler with each rank's batches"
                )


def complete_resumed_epoch(trainer: pl.Trainer) -> None:
    """Counts all batches of an epoch as trained on, if a checkpoint was saved after the epoch's last batch.

    Lightning then begins the next epoch. With another number of ranks an epoch may have more batches or fewer, and
    Lightning would go on at the same batch of the next epoch.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    if trainer.fit_loop.restarting and progress.is_last_batch and math.isfinite(trainer.num_training_batches):
        add_to_all(progress.current, int(trainer.num_training_batches) - progress.current.processed)


def add_to_all(counts: Any, number: int) -> None:
    """Adds to all of Lightning's counts of an event."""
    for name in ("ready", "started", "processed", "completed"):
        setattr(counts, name, getattr(counts, name) + number)


def batches_to_skip(trainer: pl.Trainer) -> int:
    """Batches that a run which resumes within an epoch leaves out; none after the last batch of an epoch."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    return int(progress.current.processed) if trainer.fit_loop.restarting and not progress.is_last_batch else 0


def global_batch_text(sizes: Sequence[int | None], trainer: pl.Trainer) -> str:
    """The global batch and the data ranks' shares of it.

    ``sizes`` are the samples of each data rank's full batch; None if its loader does not say.
    """
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return "Global batch: the loaders do not say how many samples a batch has"
    accumulated = trainer.accumulate_grad_batches
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            accumulated = callback.get_accumulate_grad_batches(trainer.current_epoch)
    shares = f"{len(known)} x {known[0]}" if len({*known}) == 1 else " + ".join(map(str, known))
    times = "" if accumulated == 1 else f"; accumulate_grad_batches: {accumulated}"
    return f"Global batch: {sum(known) * accumulated} samples a step (data ranks: {shares}{times})"
