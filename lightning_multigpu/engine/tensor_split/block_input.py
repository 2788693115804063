"""The input of a block: its gradient is summed over the ranks once, however many column layers use it.

============  =========================  ===============================  =====================
N ranks       input on each rank         column layers get                collectives
============  =========================  ===============================  =====================
enter         (..., in)                  (..., in)                        backward: all-reduce
gather        (..., length / N, ..., in) (..., length, ..., in)           forward: all-gather,
                                                                          backward: reduce-scatter
============  =========================  ===============================  =====================

After Shoeybi et al., Megatron-LM (2019), section 3 (f), and Korthikanti et al. (2022), section 4.2.2 (g).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lightning_multigpu.engine.tensor_split.layers import cast
from lightning_multigpu.engine.tensor_split.tensor_group import Bounds, TensorGroup


class SequencePart(NamedTuple):
    """This rank's part of a gathered tensor, as its attribute ``sequence_part``: kept for backward in its place."""

    tensor: Tensor
    dim: int
    bounds: Bounds


def enter(input: Tensor, group: TensorGroup, name: str) -> Tensor:
    """The input itself; in backward its gradient is summed over the ranks.

    Args:
        input: (..., in), the same on every rank.
        group: the ranks.
        name: in the meter.
    """
    entered: Tensor = _Enter.apply(*cast(input), group, name)  # type: ignore[no-untyped-call]
    return entered


def gather(
    input: Tensor, group: TensorGroup, dim: int, length: int, name: str, *, keeps_gathered: bool = True
) -> Tensor:
    """The whole of an input that is split along a sequence; in backward each rank gets its part of the summed gradient.

    Args:
        input: this rank's part.
        group: the ranks.
        dim: the dimension of the sequence.
        length: of the whole sequence.
        name: in the meter.
        keeps_gathered: column layers keep the whole input for backward; else this rank's part, and each of them gathers
            the whole again.
    """
    (part,) = cast(input)
    bounds = group.bounds(length)
    whole: Tensor = _Gather.apply(part, group, dim, bounds, name)  # type: ignore[no-untyped-call]
    if not keeps_gathered:
        vars(whole)["sequence_part"] = SequencePart(part.detach(), dim, bounds)
    return whole


class BlockInput:
    """The input that several column layers of a block have in common: it is entered or gathered once for all.

    Args:
        enters: :func:`enter` or :func:`gather`, with all arguments but the input.
        last: the column layer that runs last.
    """

    def __init__(self, enters: Callable[[Tensor], Tensor], last: Any) -> None:
        self._enters = enters
        self._last = last
        self._known: tuple[Tensor, int, Tensor] | None = None

    def __call__(self, input: Tensor, layer: Any) -> Tensor:
        """What the layer computes with."""
        version = 0 if input.is_inference() else input._version
        if self._known is None or self._known[0] is not input or self._known[1] != version:
            self._known = input, version, self._enters(input)
        entered = self._known[2]
        if layer is self._last:
            self._known = None
        return entered


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, group: TensorGroup, name: str) -> Tensor:
        ctx.group, ctx.layer_name = group, name
        return input.view_as(input)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.group.all_reduce(gradient.clone(memory_format=torch.contiguous_format), ctx.layer_name), None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, group: TensorGroup, dim: int, bounds: Bounds, name: str) -> Tensor:
        ctx.group, ctx.dim, ctx.bounds, ctx.layer_name = group, dim, bounds, name
        return group.all_gather(input, dim, bounds, name).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        of_part = ctx.group.reduce_scatter(gradient.clone(), ctx.dim, ctx.bounds, ctx.layer_name)
        return of_part, None, None, None, None
