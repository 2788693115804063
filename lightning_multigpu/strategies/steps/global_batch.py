"""The samples of an optimizer step, as one line at the start of a fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info

from lightning_multigpu.engine.data_parallel.agreement import full_batch_size

if TYPE_CHECKING:
    import lightning.pytorch as pl


def tell_global_batch(trainer: pl.Trainer, gather: Callable[[Any], list[Any]], ranks_a_batch: int) -> None:
    """Prints :func:`global_batch_text` on rank 0; a collective.

    Args:
        trainer: the Trainer of the fit that starts.
        gather: gathers an object of every rank, in rank order.
        ranks_a_batch: as for the text.
    """
    sizes = gather(full_batch_size(trainer.train_dataloader))
    rank_zero_info(global_batch_text(sizes[::ranks_a_batch], ranks_a_batch, trainer))


def global_batch_text(sizes: Sequence[int | None], ranks_a_batch: int, trainer: pl.Trainer) -> str:
    """The global batch and each rank's share of it.

    Args:
        sizes: samples of each data rank's full batch; None if its loader does not say.
        ranks_a_batch: ranks that train on the same batch: those of a pipeline or of a tensor group.
        trainer: the Trainer of the fit that starts.
    """
    count = len(sizes)
    ranks = "1 rank" if count == 1 else f"{count} ranks"
    if ranks_a_batch > 1:
        ranks = f"{'1 group' if count == 1 else f'{count} groups'} of {ranks_a_batch} ranks"
    known = [size for size in sizes if size is not None]
    if len(known) < count:
        return f"Global batch: {ranks}, whose loaders do not say how many samples a batch has"
    accumulated = _accumulated_batches(trainer)
    if len(set(known)) == 1:
        shares = f"{ranks} x {known[0]} (batch_size of the loader)"
    else:
        shares = f"{' + '.join(map(str, known))} (batch_size of the loaders of {ranks})"
        shares = f"({shares})" if accumulated > 1 else shares
    step = "a step" if trainer.lightning_module.automatic_optimization else "a batch"
    further = f" x {accumulated} (accumulate_grad_batches)" if accumulated > 1 else ""
    return f"Global batch: {sum(known) * accumulated} samples {step} = {shares}{further}"


def _accumulated_batches(trainer: pl.Trainer) -> int:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            return callback.get_accumulate_grad_batches(trainer.current_epoch)
    return trainer.accumulate_grad_batches
