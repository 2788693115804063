"""Linear layers and embeddings whose weights are split over the ranks of a tensor group.

A column layer and the row layer behind it make a block. Each rank computes its part of what lies between, and the block
communicates once in forward and once in backward (Shoeybi et al., Megatron-LM, 2019)::

               column layer            between            row layer
    rank 0   x --- A[:h/2] ---> y0 --- gelu, ... ---> z0 --- B[:, :h/2] ---+
                                                                           sum ---> out      forward
    rank 1   x --- A[h/2:] ---> y1 --- gelu, ... ---> z1 --- B[:, h/2:] ---+

    dx <--- sum of what both ranks compute                                     <--- d out    backward

What lies between is a :class:`.SplitTensor`. Activations outside of the block may be split along the sequence
(Korthikanti et al., 2022): an all-gather then stands at the beginning, and with ``sequence_dim`` a reduce-scatter at
the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from typing_extensions import override

from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.tensor_split.parameter_split import ParameterSplit, cut, whole_size
from lightning_multigpu.engine.tensor_split.parts import PartLayout, SplitTensor, local, own_of, place, whole, whole_of
from lightning_multigpu.engine.tensor_split.tensor_group import Bounds, TensorGroup


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer that can be split: torch's, or the Conv1D of transformers."""
    return type(module) is nn.Linear or _is_conv1d(type(module))


def linear_sizes(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    first, second = weight.shape
    return (first, second) if _is_conv1d(type(module)) else (second, first)


def _is_conv1d(kind: type) -> bool:
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


class _Split:
    """Base of the split layers: the group, and the layer's name in the meter."""

    weight: Any
    group: Any
    meter_name: str
    is_transposed = False
    """The weight is (in, out), as in the Conv1D of transformers."""

    def _joins(self, group: TensorGroup, name: str) -> None:
        self.group = group
        self.meter_name = name or type(self).__name__

    def _cut(self, parameter: Any, split: ParameterSplit) -> None:
        cut(parameter, split, self.group.rank)
        place(parameter, PartLayout(split, self.group, self.meter_name))

    def _out_in(self) -> Tensor:
        weight: Tensor = local(self.weight)
        return weight.t() if self.is_transposed else weight


class _ColumnSplit(_Split):
    bias: Any
    entry: Callable[[Tensor, _ColumnSplit], Tensor] | None = None
    """Gives the layer its input, and sums up the gradient of it, for all column layers of a block."""
    keeps_gathered = True

    def _become(
        self,
        group: TensorGroup,
        *,
        sections: Sequence[int] = (),
        unit: int | Sequence[int] = 1,
        name: str = "",
    ) -> None:
        self._joins(group, name)
        dim = int(self.is_transposed)
        size = whole_size(self.weight, dim)
        self.split = ParameterSplit.even(size, group.size, sections=sections, unit=unit)
        self._cut(self.weight, ParameterSplit(dim, self.split.ranges))
        if self.bias is not None:
            self._cut(self.bias, self.split)

    def forward(self, input: Tensor) -> Any:
        if self.entry is not None:
            input = self.entry(input, self)
        output = column_linear(input, self._out_in(), local(self.bias), self, sums=self.entry is None)
        split = ParameterSplit(output.dim() - 1, self.split.ranges)
        return SplitTensor.of(output, PartLayout(split, self.group, self.meter_name))


class _RowSplit(_Split):
    bias: Any
    sequence_dim: int | None = None

    def _become(self, group: TensorGroup, *, unit: int = 1, name: str = "") -> None:
        self._joins(group, name)
        dim = int(not self.is_transposed)
        self.split = ParameterSplit.even(whole_size(self.weight, dim), group.size, dim=dim, unit=unit)
        self._cut(self.weight, self.split)

    def forward(self, input: Tensor) -> Any:
        input, weight, bias = cast(self._own_input(input), self._out_in(), local(self.bias))
        output: Tensor = _RowLinear.apply(input, weight, bias, self)  # type: ignore[no-untyped-call]
        return _part_of_sequence(output, input, self)

    def _own_input(self, input: Tensor) -> Tensor:
        if isinstance(input, SplitTensor):
            split = input.placed.split
            if split.dim == input.dim() - 1 and split.ranges == self.split.ranges:
                return local(input)  # type: ignore[no-any-return]
            input = whole(input)
        if isinstance(input, Placeholder):
            return input.resized([*input.shape[:-1], self.split.size(self.group.rank)])
        return own_of(input, ParameterSplit(-1, self.split.ranges), self.group, self.meter_name)


def _part_of_sequence(output: Tensor, rows: Tensor, layer: Any) -> Any:
    """What a row layer or an embedding returns: whole, or a part of a sequence that was as long as ``rows``."""
    if layer.sequence_dim is None:
        return output
    return SplitTensor.of(
        output, sequence_placement(layer.sequence_dim, rows.shape[layer.sequence_dim], layer.group, layer.meter_name)
    )


def sequence_placement(dim: int, length: int, group: TensorGroup, name: str) -> PartLayout:
    """The placement of a sequence whose parts are as even as can be."""
    ranges = tuple(((a, b),) if a < b else () for a, b in group.bounds(length))
    return PartLayout(ParameterSplit(dim, ranges), group, name)


def sequence_of(input: Any) -> tuple[int, Bounds] | None:
    """The dimension and the bounds of a part that is one of consecutive entries of each rank; else None."""
    if not isinstance(input, SplitTensor) or input.placed.split.dim == input.dim() - 1:
        return None
    split, group, _ = input.placed
    bounds = group.bounds(split.whole_size)
    return (split.dim, bounds) if split.ranges == tuple(((a, b),) if a < b else () for a, b in bounds) else None


@cache
def _of_conv1d(split: Any, conv1d: Any) -> Any:
    """The class of a Conv1D that is split."""
    return type(f"{split.__name__.strip('_')}Conv1D", (split, conv1d), {"is_transposed": True})


@cache
def class_of_split(split: Any, plain: Any, kind: Any) -> Any:
    """The class of a layer that is split: ``split``, or for a user's subclass of ``plain`` one that keeps its methods.

    Their ``super()`` is then the split layer: an embedding that scales what ``super().forward`` returns still does.
    """
    return split if kind is plain else type(f"{split.__name__}{kind.__name__}", (kind, split), {})


def _converted(module: nn.Module, split: type, of_linear: type, group: TensorGroup, options: Any) -> Any:
    """Makes a linear layer a split one, in place."""
    if not is_linear(module):
        raise ValueError(f"{type(module).__name__} is no nn.Linear and no Conv1D of transformers")
    kind: Any = type(module)
    module.__class__ = _of_conv1d(split, kind) if _is_conv1d(kind) else of_linear
    module._become(group, **options)  # type: ignore[operator]
    return module


class ColumnSplitLinear(_ColumnSplit, nn.Linear):
    """A linear layer with its outputs split over the ranks: each rank computes a part of them.

    ============  ===========================  ==========================================================
    N ranks       shape on each rank           in backward
    ============  ===========================  ==========================================================
    input         (..., in)                    gradient (..., in), summed over the ranks
    weight        (out / N, in)                gradient (out / N, in), this rank's own
    bias          (out / N)                    gradient (out / N), this rank's own
    output        (..., out / N)               gradient (..., out / N)
    ============  ===========================  ==========================================================

    Communication, where the input has R rows of E bytes an element:

    ===================  =====================================  =============================================
    input and option     in forward                             in backward
    ===================  =====================================  =============================================
    whole                nothing                                all-reduce, R x in x E bytes
    part of a sequence   all-gather, R x in x E bytes           reduce-scatter, R x in x E bytes; one more
                                                                all-gather of these unless ``keeps_gathered``
    ===================  =====================================  =============================================

    The gradient of the weight is computed beside the all-reduce. The output is a :class:`.SplitTensor` of the shape
    (..., out). A rank holds (..., sequence / N, ..., in) of a part of a sequence; R counts the rows of all ranks.

    A fused projection of queries, keys and values is one layer with ``sections`` and with the size of a head as
    ``unit``: each rank has the queries, keys and values of its heads. Separate projections are three layers with that
    ``unit``.

    Initialised as ``nn.Linear`` is from the same seed. After Shoeybi et al., Megatron-LM (2019), section 3; parts of
    sequences after Korthikanti et al. (2022), section 4.2.2.

    Args:
        in_features, out_features, bias, device, dtype: those of the whole layer.
        group: the ranks.
        sections: lengths of the parts of the output that are split one by one: of queries, keys and values, for
            example, in a fused projection. One by default.
        unit: outputs that stay on one rank, of a head for example; or one number for each section.
        keeps_gathered: of a part of a sequence, keep the gathered input for backward instead of gathering it again.
        name: in the meter.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: TensorGroup,
        sections: Sequence[int] = (),
        unit: int | Sequence[int] = 1,
        keeps_gathered: bool = True,
        name: str = "",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.keeps_gathered = keeps_gathered
        self._become(group, sections=sections, unit=unit, name=name)

    @classmethod
    def of(cls, linear: nn.Module, group: TensorGroup, **options: Any) -> _ColumnSplit:
        """Makes a linear layer a column layer, in place: its parameters, hooks and places in modules stay.

        Args:
            linear: an ``nn.Linear``, or a Conv1D of transformers.
            group: the ranks.
            options: ``sections``, ``unit`` and ``name``, as for the class.

        Raises:
            ValueError: it is another module, or the sections do not fit.
        """
        return _converted(linear, _ColumnSplit, cls, group, options)  # type: ignore[no-any-return]


class RowSplitLinear(_RowSplit, nn.Linear):
    """A linear layer whose inputs are split: each rank computes a part of the sum that makes an output.

    ============  ===========================  ==========================================================
    N ranks       shape on each rank           in backward
    ============  ===========================  ==========================================================
    input         (..., in / N)                gradient (..., in / N)
    weight        (out, in / N)                gradient (out, in / N), this rank's own
    bias          (out), the same on all       gradient (out), the same on all
    output        (..., out), summed           gradient (..., out), the same on all
    ============  ===========================  ==========================================================

    Communication, where the output has R rows of E bytes an element:

    ===================  =====================================  =============================================
    input and option     in forward                             in backward
    ===================  =====================================  =============================================
    part                 all-reduce, R x out x E bytes          nothing
    whole                all-reduce, R x out x E bytes          all-gather, R x in x E bytes
    ``sequence_dim``     reduce-scatter, R x out x E bytes      all-gather, R x out x E bytes
    ===================  =====================================  =============================================

    The input is the :class:`.SplitTensor` of a column layer; of a whole one each rank takes its part. With
    ``sequence_dim`` the output is split along that dimension, and a rank holds (..., sequence / N, ..., out); R counts
    the rows of all ranks. The gradient of the bias is summed over all of them.

    Initialised as ``nn.Linear`` is from the same seed. After Shoeybi et al., Megatron-LM (2019), section 3; with
    ``sequence_dim`` after Korthikanti et al. (2022), section 4.2.2.

    Args:
        in_features, out_features, bias, device, dtype: those of the whole layer.
        group: the ranks.
        unit: inputs that stay on one rank, of a head for example.
        sequence_dim: the dimension along which the output is split over the ranks.
        name: in the meter.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: TensorGroup,
        unit: int = 1,
        sequence_dim: int | None = None,
        name: str = "",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.sequence_dim = sequence_dim
        self._become(group, unit=unit, name=name)

    @classmethod
    def of(cls, linear: nn.Module, group: TensorGroup, **options: Any) -> _RowSplit:
        """Makes a linear layer a row layer, in place: its parameters, hooks and places in modules stay.

        Args:
            linear: an ``nn.Linear``, or a Conv1D of transformers.
            group: the ranks.
            options: ``unit`` and ``name``, as for the class.

        Raises:
            ValueError: it is another module, or the unit does not fit.
        """
        if isinstance(linear, NonDynamicallyQuantizableLinear):  # the out_proj of an nn.MultiheadAttention
            linear.__class__ = nn.Linear  # type: ignore[assignment]
        return _converted(linear, _RowSplit, cls, group, options)  # type: ignore[no-any-return]


class VocabSplitEmbedding(_Split, nn.Embedding):
    """An embedding with its rows split over the ranks.

    ============  ===========================  ==========================================================
    N ranks       shape on each rank           in backward
    ============  ===========================  ==========================================================
    input         (...), integers              -
    weight        (num / N, dim)               gradient (num / N, dim), this rank's own
    output        (..., dim), summed           gradient (..., dim), the same on all
    ============  ===========================  ==========================================================

    Communication, for R entries of the input, where the output has E bytes an element:

    ===================  =====================================  =============================================
    option               in forward                             in backward
    ===================  =====================================  =============================================
    none                 all-reduce, R x dim x E bytes          nothing
    ``sequence_dim``     reduce-scatter, R x dim x E bytes      all-gather, R x dim x E bytes
    ===================  =====================================  =============================================

    With ``sequence_dim`` the input is whole, and the output is a :class:`.SplitTensor` along that dimension.

    Initialised as ``nn.Embedding`` is from the same seed. After Shoeybi et al., Megatron-LM (2019), section 3.

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: those of the whole embedding.
        group: the ranks.
        sequence_dim: the dimension along which the output is split over the ranks.
        name: in the meter.
    """

    sequence_dim: int | None = None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: TensorGroup,
        sequence_dim: int | None = None,
        name: str = "",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.sequence_dim = sequence_dim
        self._become(group, name=name)

    @classmethod
    def of(cls, embedding: nn.Embedding, group: TensorGroup, **options: Any) -> VocabSplitEmbedding:
        """Makes an embedding this one, in place: its parameters, hooks and places in modules stay.

        Raises:
            ValueError: it has an option that looks at all rows.
        """
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, option):
                raise ValueError(f"an embedding with {option} cannot be split over its rows")
        embedding.__class__ = class_of_split(cls, nn.Embedding, type(embedding))
        assert isinstance(embedding, cls)
        embedding._become(group, **options)
        return embedding

    def _become(self, group: TensorGroup, *, name: str = "") -> None:
        self._joins(group, name)
        self.split = ParameterSplit.even(self.num_embeddings, group.size)
        self._cut(self.weight, self.split)

    @override
    def forward(self, input: Tensor) -> Any:
        input = whole(input)
        start, stop = self.split.bounds(self.group.rank)
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
        output: Tensor = _Sum.apply(rows, self)  # type: ignore[no-untyped-call]
        return _part_of_sequence(output, rows, self)


def column_linear(input: Tensor, weight: Tensor, bias: Tensor | None, layer: Any, *, sums: bool = True) -> Tensor:
    """``F.linear`` with this rank's rows of a weight (out / N, in); the gradient of the input is summed over the ranks.

    Args:
        input: (..., in), the same on every rank, or a part of a sequence.
        weight: (out / N, in).
        bias: (out / N), or None.
        layer: has the group, ``meter_name`` and ``keeps_gathered``.
        sums: the gradient of the input is summed over the ranks here, and not where the input has entered the block.
    """
    sequence = sequence_of(input)
    input = whole(input) if sequence is None else local(input)
    part = getattr(input, "sequence_part", None)
    input, weight, bias = cast(input, weight, bias)
    output: Tensor = _ColumnLinear.apply(input, weight, bias, layer, sums, part, sequence)  # type: ignore[no-untyped-call]
    return output


def summed(tensor: Tensor, group: TensorGroup, name: str) -> Tensor:
    """The sum of a tensor over the ranks.

    =======  ==================  ===============================
    N ranks  shape on each rank  in backward
    =======  ==================  ===============================
    tensor   (...)               gradient (...), the same on all
    output   (...), summed       gradient (...), the same on all
    =======  ==================  ===============================

    Communication: one all-reduce of the tensor's bytes in forward, nothing in backward. All ranks have to compute the
    same with the sum: its gradient is then the gradient of each rank's tensor. The function g of Shoeybi et al.,
    Megatron-LM (2019), section 3.

    Args:
        tensor: of this rank; the same shape and dtype on every rank.
        group: the ranks.
        name: in the meter.
    """
    total: Tensor = _Summed.apply(tensor, group, name)  # type: ignore[no-untyped-call]
    return total


def gather_sequence(part: SplitTensor, name: str = "") -> Tensor:
    """The whole sequence of a part along it.

    =======  ======================  ================================================
    N ranks  shape on each rank      in backward
    =======  ======================  ================================================
    part     (..., length / N, ...)  gradient (..., length / N, ...), this rank's own
    output   (..., length, ...)      gradient (..., length, ...), the same on all
    =======  ======================  ================================================

    Communication: one all-gather of the output's bytes in forward, nothing in backward. All ranks have to compute the
    same with the whole sequence: each then takes its part of the gradient. After Korthikanti et al.
    (2022), section 4.2.2.

    Args:
        part: of :func:`split_sequence`, or what was computed of one.
        name: in the meter; by default that of the layer that has made the part.
    """
    split, group, layer = part.placed
    return whole_of(local(part), split, group, name or layer).contiguous()


def split_sequence(tensor: Tensor, group: TensorGroup, dim: int, name: str) -> Any:
    """A :class:`.SplitTensor` along the sequence of a tensor that all ranks have.

    =======  ===================================  ================================================
    N ranks  shape on each rank                   in backward
    =======  ===================================  ================================================
    tensor   (..., length, ...), the same on all  gradient (..., length, ...), the same on all
    output   (..., length / N, ...)               gradient (..., length / N, ...), this rank's own
    =======  ===================================  ================================================

    Communication: nothing in forward, one all-gather of the tensor's bytes in backward. After Korthikanti et al.
    (2022), section 4.2.2.

    Args:
        tensor: the same on every rank.
        group: the ranks.
        dim: the dimension of the sequence.
        name: in the meter.
    """
    placed = sequence_placement(dim, tensor.shape[dim], group, name)
    return SplitTensor.of(own_of(tensor, placed.split, group, name), placed)


class _ColumnLinear(Function):
    # It saves the weight without its parameter: code may assign to parameter.data before backward, and torch's own
    # linear layers compute backward with the weight of their forward pass.

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, layer: Any, sums: bool, part: Any, sequence: Any
    ) -> Tensor:
        ctx.layer, ctx.sums, ctx.part, ctx.sequence = layer, sums, None, sequence
        gathered = input
        if part is not None:  # gathered where it has entered the block
            ctx.part = part.dim, part.bounds
            ctx.save_for_backward(part.tensor, weight.detach())
            return F.linear(input, weight, bias)
        if sequence is not None:
            gathered = layer.group.all_gather(input, *sequence, layer.meter_name)
        ctx.save_for_backward(gathered if layer.keeps_gathered else input, weight.detach())
        return F.linear(gathered, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        input, weight = ctx.saved_tensors
        layer = ctx.layer
        group, sequence, name = layer.group, ctx.sequence, layer.meter_name
        rows = _rows(gradient)
        of_input = pending = of_weight = None
        if ctx.needs_input_grad[0]:
            of_input = (rows @ weight).view(*gradient.shape[:-1], weight.shape[1])
            if sequence is None and ctx.sums:
                pending = group.begin_all_reduce(of_input, name)
        if ctx.needs_input_grad[1]:
            if ctx.part is not None:
                input = group.all_gather(input, *ctx.part, name)
            elif sequence is not None and not layer.keeps_gathered:
                input = group.all_gather(input, *sequence, name)
            of_weight = rows.t() @ _rows(input)
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        if pending is not None:
            of_input = pending.finish()
        elif of_input is not None and sequence is not None:
            of_input = group.reduce_scatter(of_input, *sequence, name)
        return of_input, of_weight, of_bias, None, None, None, None


class _RowLinear(Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, layer: RowSplitLinear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(input, weight.detach())
        output = _joined(F.linear(input, weight), layer)
        return output if bias is None else output.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        input, weight = ctx.saved_tensors
        gradient = _whole_gradient(gradient, input.shape, ctx.layer)
        rows = _rows(gradient)
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            of_input = (rows @ weight).view(input.shape)
        if ctx.needs_input_grad[1]:
            of_weight = rows.t() @ _rows(input)
        return of_input, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None


class _Sum(Function):
    """The sum over ranks of what each has computed of an embedding."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, layer: VocabSplitEmbedding) -> Tensor:
        ctx.layer, ctx.shape = layer, rows.shape
        return _joined(rows.detach().clone(), layer)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _whole_gradient(gradient, ctx.shape, ctx.layer), None


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, name: str) -> Tensor:
        return group.all_reduce(tensor.detach().clone(), name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient, None, None


def _joined(partial: Tensor, layer: Any) -> Tensor:
    """The sum over ranks, or this rank's part of it along the sequence."""
    group, dim = layer.group, layer.sequence_dim
    total: Tensor
    if dim is None:
        total = group.all_reduce(partial.contiguous(), layer.meter_name)
    else:
        total = group.reduce_scatter(partial, dim, group.bounds(partial.shape[dim]), layer.meter_name)
    return total


def _whole_gradient(gradient: Tensor, shape: torch.Size, layer: Any) -> Tensor:
    group, dim = layer.group, layer.sequence_dim
    if dim is None:
        return gradient
    whole: Tensor = group.all_gather(gradient, dim, group.bounds(shape[dim]), layer.meter_name)
    return whole


def _rows(tensor: Tensor) -> Tensor:
    """The tensor as a matrix, also where this rank has no columns of it."""
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def cast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors in the dtype of autocast, if that is on."""
    kind = next(tensor for tensor in tensors if tensor is not None).device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)
