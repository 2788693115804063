"""The input of a block: its gradient is summed over the ranks once, however many column layers use it.

============  =========================  ===============================  =====================
input         on each rank               column layers get                collectives
============  =========================  ===============================  =====================
whole         (..., in)                  (..., in)                        backward: all-reduce
part          (..., length / N, ..., in) (..., length, ..., in)           forward: all-gather,
                                                                          backward: reduce-scatter
============  =========================  ===============================  =====================

After Shoeybi et al., Megatron-LM (2019), section 3 (f), and Korthikanti et al. (2022), section 4.2.2 (g).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lightning_multigpu.engine.tensor_split.parameter_split import ParameterSplit
from lightning_multigpu.engine.tensor_split.parts import PartLayout, SplitTensor, entered, local, whole
from lightning_multigpu.engine.tensor_split.tensor_group import Bounds, TensorGroup


def sequence_placement(dim: int, length: int, group: TensorGroup, name: str) -> PartLayout:
    """The placement of a sequence whose parts are as even as can be."""
    ranges = tuple(((a, b),) if a < b else () for a, b in group.bounds(length))
    return PartLayout(ParameterSplit(dim, ranges), group, name)


def is_sequence(input: Any) -> bool:
    """Whether an input is a part along a sequence, of consecutive entries of each rank."""
    if not isinstance(input, SplitTensor) or input.placed.split.dim == input.dim() - 1:
        return False
    split, group, name = input.placed
    return split == sequence_placement(split.dim, split.whole_size, group, name).split


def enter(input: Tensor, group: TensorGroup, name: str) -> Tensor:
    """The whole input; in backward its gradient is summed over the ranks, and a part gets its part of that.

    Args:
        input: (..., in), the same on every rank, or a :class:`.SplitTensor` of a sequence.
        group: the ranks.
        name: in the meter.
    """
    if not is_sequence(input):
        (tensor,) = cast(whole(input))
        return entered(tensor, group, name)
    split = input.placed.split  # type: ignore[attr-defined]
    (part,) = cast(local(input))
    gathered: Tensor = _Gather.apply(part, group, split.dim, group.bounds(split.whole_size), name)  # type: ignore[no-untyped-call]
    return gathered


class BlockInput:
    """The input that several column layers of a block have in common: it is entered or gathered once for all.

    Args:
        group: the ranks.
        name: in the meter.
        last: the column layer that runs last.
    """

    def __init__(self, group: TensorGroup, name: str, last: Any) -> None:
        self._group, self._name, self._last = group, name, last
        self._known: tuple[Tensor, int, Tensor] | None = None

    def __call__(self, input: Tensor, layer: Any) -> Tensor:
        """What the layer computes with."""
        version = 0 if input.is_inference() else input._version
        if self._known is None or self._known[0] is not input or self._known[1] != version:
            self._known = input, version, enter(input, self._group, self._name)
        found = self._known[2]
        if layer is self._last:
            self._known = None
        return found


def cast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors in the dtype of autocast, if that is on."""
    kind = next(tensor for tensor in tensors if tensor is not None).device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)


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
