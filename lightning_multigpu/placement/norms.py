"""The norm of gradients over ranks, clipping by it, and one decision of all ranks on inf and nan.

A rank *holds* a gradient that is in its memory: that of a whole parameter, or its part of one. It *owns* the gradients
that it counts in sums over the ranks. Several ranks may hold the same gradient, and one of them owns it::

                                    rank 0    rank 1
    a parameter in parts            owns      owns      each rank its own part
    a parameter on both ranks       owns      holds     counted once
    a parameter of rank 1 alone               owns

The norm is that of the gradients that all ranks own. By it each rank scales the gradients that it holds, those that it
owns among them. A rank without gradients takes part in the sum all the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

ReduceSum = Callable[[Tensor], Tensor]
"""Returns the sum of the ranks' numbers, the same on every rank; it may overwrite the rank's own. A collective."""


def sum_of_squares(gradients: Iterable[Tensor]) -> Tensor:
    """The square of the norm of these gradients together, in float64 and without dimensions; 0 if there are none.

    Gradients of 16 bits have norms in float32, since a float16 overflows at 65,504.
    """
    values = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    norms = [torch.linalg.vector_norm(v, dtype=torch.float32) if v.dtype.itemsize < 4 else v for v in values]
    return get_total_norm(norms).double().square()


def clip_by_norm(owned: Iterable[Tensor], held: Iterable[Tensor], max_norm: float, reduce_sum: ReduceSum) -> None:
    """Clips by the norm of all ranks' gradients, as torch.nn.utils.clip_grad_norm_ does on one device.

    ``owned`` and ``held`` are parameters whose gradients this rank owns, and holds.
    """
    squares = reduce_sum(sum_of_squares(p.grad for p in owned if p.grad is not None))
    scale_to_norm((p.grad for p in held if p.grad is not None), max_norm, squares)


@torch.no_grad()
def scale_to_norm(gradients: Iterable[Tensor], max_norm: float, squares: Tensor | float) -> None:
    """Scales the gradients that this rank holds, in place; the second half of :func:`clip_by_norm`.

    ``squares`` is the sum of the squares of all ranks' gradients, which others have made.
    """
    held = [*gradients]
    holders = [gradient.detach() for gradient in held]
    for holder, gradient in zip(holders, held, strict=True):
        holder.grad = gradient  # torch clips the gradients of other tensors
    dtype = functools.reduce(torch.promote_types, (gradient.dtype.to_real() for gradient in held), torch.float32)
    norm = torch.as_tensor(squares, dtype=torch.float64).sqrt().to(dtype)
    if norm.is_cuda or not norm + 1e-6 <= max_norm:  # nan too; on CPUs a factor of 1 costs a pass over the memory
        clip_grads_with_norm_(holders, max_norm, norm)


class CommonOverflow:
    """Makes a gradient scaler skip a step on all ranks or on none, until :meth:`end`."""

    def __init__(self, scaler: GradScaler, reduce_sum: ReduceSum) -> None:
        self._scaler = scaler
        self._reduce_sum = reduce_sum
        self._unscale = scaler._unscale_grads_
        vars(scaler)["_unscale_grads_"] = self._unscale_together

    def end(self) -> None:
        """Gives the scaler its own method back."""
        vars(self._scaler).pop("_unscale_grads_", None)

    def _unscale_together(self, optimizer: Optimizer, factor: Tensor, zero: Tensor, allow_fp16: bool) -> Any:
        # A rank without gradients has no flag, and the scaler needs one, where ranks can exchange it.
        with torch._C.DisableTorchFunctionSubclass():  # of split parameters these are the parts
            flags = self._unscale(optimizer, factor, zero, allow_fp16) or {zero.device: zero}
        for flag in flags.values():
            flag.copy_(self._reduce_sum(flag) > 0)  # fused optimizers skip a step at 1 only
        return flags
