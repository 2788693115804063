"""The cross-entropy of logits that are split over the vocabulary, which are never gathered.

Each rank sends three numbers a row: the largest of its logits, the sum of their exponentials above it, and the logit of
the target if it is this rank's. From those of all ranks each rank computes the loss of every row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lightning_multigpu.engine.tensor_split.parts import PartLayout


def split_cross_entropy(
    logits: Tensor,
    target: Tensor,
    placed: PartLayout,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The value of ``F.cross_entropy`` for whole logits, the same on every rank; its gradient is this rank's own.

    After Shoeybi et al., Megatron-LM (2019), section 3, with the running maximum of Milakov and Gimelshein (2018).

    Args:
        logits: (rows, classes / N), those of this rank.
        target: (rows), class numbers of the whole vocabulary, or ``ignore_index``.
        placed: of the classes; consecutive ones on each rank.
        ignore_index, reduction, label_smoothing: as those of ``F.cross_entropy``.

    Raises:
        IndexError: a target is no class.
    """
    counts, num_classes = target != ignore_index, placed.split.whole_size
    if bool((((target < 0) | (target >= num_classes)) & counts).any()):
        raise IndexError(f"Target is out of bounds: there are {num_classes} classes")
    losses: Tensor = _SplitCrossEntropy.apply(logits, target, counts, placed, label_smoothing)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


class _SplitCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, counts: Tensor, placed: PartLayout, smoothing: float
    ) -> Tensor:
        split, group, layer = placed
        start, stop = split.bounds(group.rank)
        own = counts & (target >= start) & (target < stop)
        column = (target - start).masked_fill(~own, 0).unsqueeze(1)
        values = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        told = values.new_zeros(1, len(values), 4 if smoothing else 3)
        told[0, :, 0] = -torch.inf
        if stop > start:
            largest = values.amax(1)
            told[0, :, 0] = largest
            finite = largest.clamp_min(torch.finfo(values.dtype).min)  # all of this rank's classes may be masked
            told[0, :, 1] = (values - finite.unsqueeze(1)).exp_().sum(1)
            told[0, :, 2] = values.gather(1, column).squeeze(1).masked_fill(~own, 0)
            if smoothing:
                told[0, :, 3] = values.sum(1)
        ranks = [(rank, rank + 1) for rank in range(group.size)]
        everybodys = group.all_gather(told, 0, ranks, f"{layer} cross_entropy")
        largest = everybodys[:, :, 0].amax(0)
        total = (everybodys[:, :, 1] * (everybodys[:, :, 0] - largest).exp()).sum(0)
        log_total = total.log() + largest
        losses = log_total - everybodys[:, :, 2].sum(0)
        if smoothing:
            of_all = log_total - everybodys[:, :, 3].sum(0) / split.whole_size
            losses = (1 - smoothing) * losses + smoothing * of_all
        ctx.smoothing, ctx.num_classes = smoothing, split.whole_size
        ctx.save_for_backward(logits, log_total, own, column, counts)
        return losses.masked_fill(~counts, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        logits, log_total, own, column, counts = ctx.saved_tensors
        smoothing = ctx.smoothing
        result = (logits.to(log_total.dtype) - log_total.unsqueeze(1)).exp_()
        if smoothing:
            result.sub_(smoothing / ctx.num_classes)
        if result.shape[1]:
            result.scatter_add_(1, column, -(1 - smoothing) * own.to(result.dtype).unsqueeze(1))
        result.mul_((gradient * counts).unsqueeze(1))
        return result.to(logits.dtype), None, None, None, None
