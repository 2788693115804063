"""Check of a first batch: the losses of its micro-batches add up to the loss of the batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_multigpu.engine.batch_size import leading_size
from lightning_multigpu.engine.data_parallel.agreement import LossReduction
from lightning_multigpu.engine.pipeline.stages.micro_batches import disagreement, relative_tolerance, split_batch
from lightning_multigpu.strategies.pipeline.dry_run import without_trace
from lightning_multigpu.strategies.pipeline.split_model import SplitModel

LossOf = Callable[[Any, tuple[int, ...]], Any]


def check_losses(
    model: SplitModel,
    batch: Any,
    loss_of: LossOf,
    weights: Sequence[float],
    *,
    loss_reduction: LossReduction,
    seed: int,
) -> None:
    """Compares the loss of a batch as a whole with that of its micro-batches; a collective of the pipeline.

    Both are computed forward only and in evaluation mode: dropout draws other numbers for a whole batch than for its
    parts, and BatchNorm's statistics of a part are not those of the whole, which is known and documented. A step may
    draw further random numbers by itself. So where the losses differ, they are computed again with another seed; if
    that changes them, nothing can be said, and training goes on.

    The check leaves no trace in the module, in random states, in logs and in the batch; what the step does to other
    objects stays done.

    Args:
        model: the split model.
        batch: the same on every stage.
        loss_of: returns, on the last stage, the loss of the training step for a batch or micro-batch and a seed, or
            an exception that the step raised after the layers.
        weights: of the losses of the micro-batches.
        loss_reduction: the option that the weights come from, for the message.
        seed: of the run.

    Raises:
        ValueError: on every stage, if the losses do not add up to the loss of the whole batch.
    """

    def losses_of(attempt: int) -> list[Any]:
        # Of copies: a step may change its batch.
        batches = [copy.deepcopy(batch), *split_batch(copy.deepcopy(batch), len(weights))]
        losses = [loss_of(part, (seed, 2, attempt, number)) for number, part in enumerate(batches)]
        model.group.finish()
        return losses

    with without_trace(model.module), torch.no_grad():
        model.module.eval()
        losses = losses_of(0)
        samples = [leading_size(part) or 1 for part in split_batch(batch, len(weights))]
        found = model.group.from_last(
            _disagreement(model, losses, weights, samples, loss_reduction) if model.is_last else None
        )
        if found is None:
            return
        again = losses_of(1)
        fatal = model.group.from_last(model.is_last and _all_equal(losses, again))
        model.group.finish()  # the run may end here
    if fatal:
        raise ValueError(found)
    rank_zero_info(
        "Whether the losses of micro-batches add up to the loss of their batch cannot be told: the step draws "
        "random numbers in evaluation mode too, or does not return a loss there."
    )


def _disagreement(
    model: SplitModel,
    losses: list[Any],
    weights: Sequence[float],
    samples: Sequence[int],
    loss_reduction: LossReduction,
) -> str | None:
    """The message about losses that do not add up; None if they do."""
    if not all(map(_is_loss, losses)):
        return "no loss"
    whole, *rest = (float(loss) for loss in losses)
    if not torch.isfinite(losses[0]).all():
        return None
    dtypes = {loss.dtype for loss in losses} | {p.dtype for p in model.module.parameters() if p.is_floating_point()}
    if "16" in model.module.trainer.precision or "transformer" in model.module.trainer.precision:
        dtypes.add(torch.bfloat16)
    rtol = relative_tolerance(sorted(dtypes, key=str), losses[0].device.type)
    given = repr(loss_reduction)
    if callable(loss_reduction):
        given = getattr(loss_reduction, "__name__", "a function")
    return disagreement(whole, rest, weights, samples, given=given, rtol=rtol)


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


def _all_equal(losses: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two runs gave the same losses, to the bit."""
    return all(
        _is_loss(a) and _is_loss(b) and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        for a, b in zip(losses, others, strict=True)
    )
