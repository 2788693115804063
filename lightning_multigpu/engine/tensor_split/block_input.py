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

from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lightning_multigpu.engine.tensor_split.layers import cast, sequence_of
from lightning_multigpu.engine.tensor_split.parts import entered, local, whole
from lightning_multigpu.engine.tensor_split.tensor_group import Bounds, TensorGroup


class SequencePart(NamedTuple):
    """This rank's part of a gathered tensor, as its attribute ``sequence_part``: kept for backward in its place."""

    tensor: Tensor
    dim: int
    bounds: Bounds


def enter(input: Tensor, group: TensorGroup, name: str, *, keeps_gathered: bool = True) -> Tensor:
    """The whole input; in backward its gradient is summed over the ranks, and a part gets its part of that.

    Args:
        input: (..., in), the same on every rank, or a :class:`.SplitTensor` of a sequence.
        group: the ranks.
        name: in the meter.
        keeps_gathered: column layers keep the gathered input for backward; else this rank's part, and each of them
            gathers the whole again.
    """
    sequence = sequence_of(input)
    if sequence is None:
        (tensor,) = cast(whole(input))
        return entered(tensor, group, name)
    (part,) = cast(local(input))
    gathered: Tensor = _Gather.apply(part, group, *sequence, name)  # type: ignore[no-untyped-call]
    if not keeps_gathered:
        vars(gathered)["sequence_part"] = SequencePart(part.detach(), *sequence)
    return gathered


class BlockInput:
    """The input that several column layers of a block have in common: it is entered or gathered once for all.

    Args:
        group: the ranks.
        name: in the meter.
        last: the column layer that runs last.
        keeps_gathered: as for :func:`enter`.
    """

    def __init__(self, group: TensorGroup, name: str, last: Any, *, keeps_gathered: bool = True) -> None:
        self._group, self._name = group, name
        self._last = last
        self.keeps_gathered = keeps_gathered
        self._known: tuple[Tensor, int, Tensor] | None = None

    def __call__(self, input: Tensor, layer: Any) -> Tensor:
        """What the layer computes with."""
        version = 0 if input.is_inference() else input._version
        if self._known is None or self._known[0] is not input or self._known[1] != version:
            entered_ = enter(input, self._group, self._name, keeps_gathered=self.keeps_gathered)
            self._known = input, version, entered_
        entered = self._known[2]
        if layer is self._last:
            self._known = None
        return entered


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
