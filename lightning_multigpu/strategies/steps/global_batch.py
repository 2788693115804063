"""The samples of an optimizer step, as one line at the start of a fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import GradientAccumulationScheduler

if TYPE_CHECKING:
    import lightning.pytorch as pl


def global_batch_text(sizes: Sequence[int | None], trainer: pl.Trainer) -> str:
    """The global batch and the data ranks' shares of it.

    Args:
        sizes: samples of each data rank's full batch; None if its loader does not say.
        trainer: the Trainer of the fit that starts.
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
