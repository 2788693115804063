"""Whether the losses of micro-batches add up to the loss of their batch.

With weights w and losses l of the micro-batches, a batch counts as sum(w l). That is the loss of the whole batch if
the loss is a mean or a sum over what the weights count; it is not, and no weights make it so, if the loss compares the
samples of a batch with each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-5}
_TOLERANCE_TF32 = 1e-3
_TOLERANCE_HALF = 2e-2


def combined_loss(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The loss of a batch, of the shape of each micro-batch's.

    A micro-batch of weight 0 is left out: its loss is a mean over nothing, which is NaN.
    """
    total = sum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight)
    assert isinstance(total, Tensor)
    return total


def relative_tolerance(dtypes: Sequence[torch.dtype], device_type: str) -> float:
    """How far losses may be apart through rounding alone, relative to their size.

    Args:
        dtypes: of everything that takes part; the coarsest one counts.
        device_type: on "cuda" float32 may pass through TF32, which has ten bits of mantissa.
    """
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    if coarsest == torch.float32 and device_type == "cuda":
        return _TOLERANCE_TF32
    return _TOLERANCES.get(coarsest, _TOLERANCE_HALF)


def relative_difference(whole: float, losses: Sequence[float], weights: Sequence[float]) -> float:
    """Between the loss of a batch as a whole and what its micro-batches add up to; NaN if the latter is NaN.

    Relative to the larger of the loss and the sum of the parts' magnitudes: parts may cancel each other out.
    """
    parts = [loss * weight for loss, weight in zip(losses, weights, strict=True) if weight]
    difference = abs(whole - sum(parts))
    if difference == 0 or math.isnan(difference):
        return difference
    return difference / max(abs(whole), sum(abs(part) for part in parts))


def disagreement(
    whole: float, losses: Sequence[float], weights: Sequence[float], samples: Sequence[int], *, given: str, rtol: float
) -> str | None:
    """Why the losses of a batch's micro-batches must not be added up with these weights; None if they may.

    Args:
        whole: the loss of the batch as a whole.
        losses, weights, samples: of each micro-batch.
        given: the loss reduction that the weights come from, for the message: "mean", "sum" or a function's name.
        rtol: the relative difference that rounding explains.
    """
    difference = relative_difference(whole, losses, weights)
    if difference <= rtol:
        return None
    combined = sum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight)
    return (
        f"the loss of the first batch is {whole:.10g} as a whole, and {combined:.10g} in {len(losses)} micro-batches "
        f"under loss_reduction={given} (relative difference {difference:.2g}, rounding explains {rtol:.0e}): training "
        f"would follow other gradients than one device's. {_fix(whole, losses, samples, rtol)}"
    )


def _fix(whole: float, losses: Sequence[float], samples: Sequence[int], rtol: float) -> str:
    weights = {"sum": [1.0] * len(losses), "mean": [size / sum(samples) for size in samples]}
    fitting = [name for name, known in weights.items() if relative_difference(whole, losses, known) <= rtol]
    if fitting:
        return f"With loss_reduction={fitting[0]!r} both agree; pass that"
    return (
        "If it is a mean over something else than samples, pass loss_reduction=a function that gets a batch and "
        "returns what it counts for (the number of targets that are not ignored, for example). A loss that compares "
        "samples of a batch with each other cannot be cut: pass num_micro_batches=1"
    )
