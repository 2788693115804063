"""Linear layers and embeddings whose weights are split over the ranks of a tensor group.

A column layer and the row layer behind it make a block, which sums over the ranks once in forward and once in backward;
what lies between is a :class:`.SplitTensor`. After Shoeybi et al., Megatron-LM (2019), section 3.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from typing_extensions import override

from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.tensor_split.parameter_split import ParameterSplit, whole_size
from lightning_multigpu.engine.tensor_split.parts import PartLayout, SplitTensor, cut, entered, local, own_of, whole
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer that can be split: torch's, or the Conv1D of transformers."""
    return type(module) is nn.Linear or _is_conv1d(type(module))


def linear_sizes(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    first, second = weight.shape
    return (first, second) if _is_conv1d(type(module)) else (second, first)


def _is_conv1d(kind: type) -> bool:
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


class SplitLayer(nn.Module):
    """A layer of which each rank has a part. It is copied and pickled as the whole layer that it was."""

    weight: Any
    bias: Any
    part_layout: PartLayout
    """Of a column layer's outputs, a row layer's inputs, an embedding's rows, or the features of all heads."""
    is_transposed = False
    """The weight is (in, out), as in the Conv1D of transformers."""
    whole_kind: type[nn.Module]
    """The class of the whole layer."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in vars(self).items() if name not in _OURS}
        return copyreg._reconstructor, (self.whole_kind, object, None), state  # type: ignore[attr-defined]

    def _out_in(self) -> Tensor:
        weight: Tensor = local(self.weight)
        return weight.t() if self.is_transposed else weight


_OURS = ("part_layout", "block_input", "whole_kind")


def split_as(layer: nn.Module, split: Any) -> None:
    """Makes a layer one of the class ``split``, in place; its parameters stay as they are.

    A layer of the user's own class keeps its methods, whose ``super()`` is then the split layer: an embedding that
    scales what ``super().forward`` returns still does.
    """
    kind: Any = type(layer)
    name = f"{split.__name__}{kind.__name__}"
    if _is_conv1d(kind):
        split = type(name, (split, kind), {"is_transposed": True})
    elif not issubclass(split, kind):
        split = type(name, (kind, split), {})
    layer.__class__, vars(layer)["whole_kind"] = split, kind


def restore(layer: nn.Module) -> None:
    """Makes a split layer what it was, in place; its parameters stay as they are."""
    layer.__class__ = vars(layer)["whole_kind"]
    for name in _OURS:
        vars(layer).pop(name, None)


class BlockInput:
    """The input (..., in) that several column layers of a block have in common: its gradient is summed once for all."""

    def __init__(self, group: TensorGroup, name: str, last: Any) -> None:
        self._group, self._name, self._last = group, name, last
        self._known: tuple[Tensor, int, Tensor] | None = None

    def __call__(self, input: Tensor, layer: Any) -> Tensor:
        version = 0 if input.is_inference() else input._version
        if self._known is None or self._known[0] is not input or self._known[1] != version:
            self._known = input, version, enter(input, self._group, self._name)
        found = self._known[2]
        if layer is self._last:
            self._known = None
        return found


class ColumnSplitLinear(SplitLayer, nn.Linear):
    """A linear layer with its outputs split over the ranks: each rank computes a part of them.

    ============  ===========================  ==========================================================
    N ranks       shape on each rank           in backward
    ============  ===========================  ==========================================================
    input         (..., in)                    gradient (..., in), summed over the ranks
    weight        (out / N, in)                gradient (out / N, in), this rank's own
    bias          (out / N)                    gradient (out / N), this rank's own
    output        (..., out / N)               gradient (..., out / N)
    ============  ===========================  ==========================================================

    The gradient of the weight is computed beside the all-reduce of the input's. The output is a :class:`.SplitTensor`
    of the shape (..., out).

    A fused projection of queries, keys and values is one layer with ``sections`` and with the size of a head as
    ``unit``: each rank has the queries, keys and values of its heads. Separate projections are three layers with that
    ``unit``.
    """

    block_input: Callable[[Tensor, ColumnSplitLinear], Tensor] | None = None
    """Gives the layer its input, and sums up the gradient of it, for all column layers of a block."""

    @classmethod
    def of(
        cls,
        linear: nn.Module,
        group: TensorGroup,
        *,
        sections: Sequence[int] = (),
        unit: int | Sequence[int] = 1,
        name: str = "",
    ) -> Any:
        """Makes a linear layer a column layer, in place: its parameters, hooks and places in modules stay.

        Args:
            linear: an ``nn.Linear``, or a Conv1D of transformers.
            sections: lengths of the parts of the output that are split one by one; one by default.
            unit: outputs that stay on one rank, of a head for example; or one number for each section.

        Raises:
            ValueError: the sections do not fit.
        """
        split_as(linear, cls)
        layer: Any = linear
        dim = int(layer.is_transposed)
        split = ParameterSplit.even(whole_size(layer.weight, dim), group.size, sections=sections, unit=unit)
        layer.part_layout = PartLayout(split, group, name)
        cut(layer.weight, layer.part_layout.at(dim))
        if layer.bias is not None:
            cut(layer.bias, layer.part_layout)
        return layer

    @override
    def forward(self, input: Tensor) -> Any:
        weight, bias = self._out_in(), local(self.bias)
        if self.block_input is not None:
            output = F.linear(self.block_input(input, self), weight, bias)
        else:
            output = column_linear(input, weight, bias, self.part_layout)
        return SplitTensor.of(output, self.part_layout.at(output.dim() - 1))


class RowSplitLinear(SplitLayer, nn.Linear):
    """A linear layer whose inputs are split: each rank computes a part of the sum that makes an output.

    ============  ===========================  ==========================================================
    N ranks       shape on each rank           in backward
    ============  ===========================  ==========================================================
    input         (..., in / N)                gradient (..., in / N)
    weight        (out, in / N)                gradient (out, in / N), this rank's own
    bias          (out), the same on all       gradient (out), the same on all
    output        (..., out), summed           gradient (..., out), the same on all
    ============  ===========================  ==========================================================

    The input is the :class:`.SplitTensor` of a column layer; of a whole one each rank takes its part.
    """

    @classmethod
    def of(cls, linear: nn.Module, group: TensorGroup, *, unit: int = 1, name: str = "") -> Any:
        """As :meth:`ColumnSplitLinear.of`; ``unit`` are inputs."""
        split_as(linear, cls)
        layer: Any = linear
        dim = int(not layer.is_transposed)
        split = ParameterSplit.even(whole_size(layer.weight, dim), group.size, dim=dim, unit=unit)
        layer.part_layout = PartLayout(split, group, name)
        cut(layer.weight, layer.part_layout)
        return layer

    @override
    def forward(self, input: Tensor) -> Any:
        rows = F.linear(self._own_input(input), self._out_in())
        return summed(rows, self.part_layout.group, self.part_layout.layer, bias=local(self.bias))

    def _own_input(self, input: Tensor) -> Tensor:
        split, group, name = placed = self.part_layout.at(input.dim() - 1)
        if isinstance(input, SplitTensor):
            if input.placed.split == split:
                return local(input)  # type: ignore[no-any-return]
            input = whole(input)
        if isinstance(input, Placeholder):
            return input.resized([*input.shape[:-1], split.size(group.rank)])
        return own_of(input, placed, name)


class VocabSplitEmbedding(SplitLayer, nn.Embedding):
    """An embedding with its rows split over the ranks.

    ============  ===========================  ==========================================================
    N ranks       shape on each rank           in backward
    ============  ===========================  ==========================================================
    input         (...), integers              -
    weight        (num / N, dim)               gradient (num / N, dim), this rank's own
    output        (..., dim), summed           gradient (..., dim), the same on all
    ============  ===========================  ==========================================================
    """

    @classmethod
    def of(cls, embedding: nn.Embedding, group: TensorGroup, *, name: str = "") -> VocabSplitEmbedding:
        """Makes an embedding this one, in place: its parameters, hooks and places in modules stay.

        Raises:
            ValueError: it has an option that looks at all rows.
        """
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, option):
                raise ValueError(f"an embedding with {option} cannot be split over its rows")
        split_as(embedding, cls)
        assert isinstance(embedding, cls)
        embedding.part_layout = PartLayout(ParameterSplit.even(embedding.num_embeddings, group.size), group, name)
        cut(embedding.weight, embedding.part_layout)
        return embedding

    @override
    def forward(self, input: Tensor) -> Any:
        input = whole(input)
        split, group, name = self.part_layout
        start, stop = split.bounds(group.rank)
        # What is no row at all stays with the first or the last rank, where looking it up raises.
        elsewhere = (input < start) & (start > 0) | (input >= stop) & (stop < self.num_embeddings)
        padding = None
        if self.padding_idx is not None and start <= self.padding_idx < stop:
            padding = self.padding_idx - start
        weight = local(self.weight)
        if stop == start:
            rows = weight.sum(0).expand(*input.shape, -1)  # zeros, through which gradients can flow
        else:
            rows = F.embedding((input - start).masked_fill(elsewhere, 0), weight, padding)
            rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return summed(rows, group, name)


def enter(input: Tensor, group: TensorGroup, name: str) -> Tensor:
    """The whole input (..., in), in autocast's dtype; in backward its gradient is summed over the ranks."""
    (tensor,) = _cast(whole(input))
    return entered(tensor, group, name)


def column_linear(input: Tensor, weight: Tensor, bias: Tensor | None, placed: PartLayout) -> Tensor:
    """``F.linear`` of an input (..., in) with this rank's rows of a weight (out / N, in), and of a bias (out / N).

    The gradient of the input is summed over the ranks.
    """
    return _ColumnLinear.apply(*_cast(whole(input), weight, bias), placed)  # type: ignore[no-untyped-call, no-any-return]


def summed(tensor: Tensor, group: TensorGroup, name: str, *, bias: Tensor | None = None) -> Tensor:
    """The sum over the ranks of what each has computed, which may be overwritten; the same bias is added on all.

    All ranks have to compute the same with the sum: its gradient is then the gradient of each rank's tensor.
    """
    return _Sum.apply(tensor, bias, group, name)  # type: ignore[no-untyped-call, no-any-return]


def _cast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors in the dtype of autocast, if that is on."""
    kind = next(tensor for tensor in tensors if tensor is not None).device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)


class _ColumnLinear(Function):
    # It saves the weight without its parameter: code may assign to parameter.data before backward, and torch's own
    # linear layers compute backward with the weight of their forward pass.

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, placed: PartLayout) -> Tensor:
        ctx.placed = placed
        ctx.save_for_backward(input, weight.detach())
        return F.linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        input, weight = ctx.saved_tensors
        rows = _rows(gradient)
        pending = of_weight = None
        if ctx.needs_input_grad[0]:
            of_input = (rows @ weight).view(*gradient.shape[:-1], weight.shape[1])
            pending = ctx.placed.group.begin_all_reduce(of_input, ctx.placed.layer)
        if ctx.needs_input_grad[1]:
            of_weight = rows.t() @ _rows(input)
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return None if pending is None else pending(), of_weight, of_bias, None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, bias: Tensor | None, group: TensorGroup, name: str) -> Tensor:
        total = group.all_reduce(tensor.detach().contiguous(), name)
        return total if bias is None else total.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient, _rows(gradient).sum(0) if ctx.needs_input_grad[1] else None, None, None


def _rows(tensor: Tensor) -> Tensor:
    """The tensor as a matrix, also where this rank has no columns of it."""
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])
