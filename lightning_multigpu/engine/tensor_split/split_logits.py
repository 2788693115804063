"""Logits that are split over the vocabulary and behave like whole ones.

``F.cross_entropy`` computes the loss of the parts, and never gathers them. Operations on the other dimensions work on
the parts. Any other operation gets the whole tensor, which is gathered for it::

    logits = model(x)                           each rank has (batch, tokens, vocabulary / N)
    logits[:, :-1].reshape(-1, vocabulary)      still in parts
    F.cross_entropy(..., targets)               in parts
    logits.argmax(-1)                           gathered
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_multigpu.engine.tensor_split.cross_entropy import split_cross_entropy
from lightning_multigpu.engine.tensor_split.layers import gather_last
from lightning_multigpu.engine.tensor_split.parameter_split import ParameterSplit
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup


@dataclass(frozen=True)
class LogitsLayout:
    """How logits are split.

    Attributes:
        group: the ranks.
        split: of the last dimension.
        layer: the name of the layer that computes them, for the meter.
        on_gather: called with the layer's name and the operation, whenever logits are gathered for one.
    """

    group: TensorGroup
    split: ParameterSplit
    layer: str = "logits"
    on_gather: Callable[[str, str], object] = lambda layer, operation: None


class SplitLogits(Tensor):
    """This rank's part (..., classes / N) of logits, which shows the shape of the whole; make it with :meth:`of`."""

    layout_of_ranks: LogitsLayout

    @classmethod
    def of(cls, part: Tensor, layout: LogitsLayout) -> SplitLogits:
        """Logits of this rank's part (..., classes / N)."""
        logits = part.as_subclass(cls)
        logits.layout_of_ranks = layout
        return logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            handled = _HANDLERS.get(func)
            if handled is not None:
                result = handled(func, *args, **kwargs)
                if result is not NotImplemented:
                    return result
            return func(*_gathered(args, func), **_gathered(kwargs, func))


def _part(logits: SplitLogits) -> Tensor:
    return logits.as_subclass(Tensor)


def _like(part: Tensor, logits: SplitLogits) -> SplitLogits:
    return SplitLogits.of(part, logits.layout_of_ranks)


def _gathered(value: Any, func: Any) -> Any:
    if isinstance(value, SplitLogits):
        layout = value.layout_of_ranks
        layout.on_gather(layout.layer, getattr(func, "__name__", str(func)))
        return gather_last(_part(value), layout.group, layout.split, f"{layout.layer} gathered")
    if isinstance(value, list | tuple):
        found = [_gathered(each, func) for each in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if isinstance(value, dict):
        return {key: _gathered(each, func) for key, each in value.items()}
    return value


def _shape(logits: SplitLogits) -> torch.Size:
    return torch.Size((*_part(logits).shape[:-1], logits.layout_of_ranks.split.whole_size))


def _size(func: Any, logits: SplitLogits, dim: int | None = None) -> Any:
    return _shape(logits) if dim is None else _shape(logits)[dim]


def _plain(func: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    """Operations that are not about elements."""
    return func(_part(logits), *args, **kwargs) if isinstance(logits, SplitLogits) else NotImplemented


def _each(func: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    """Operations on each element by itself."""
    if not isinstance(logits, SplitLogits) or any(isinstance(arg, Tensor) for arg in (*args, *kwargs.values())):
        return NotImplemented
    return _like(func(_part(logits), *args, **kwargs), logits)


def _view(func: Any, logits: Any, *shape: Any, **kwargs: Any) -> Any:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
    whole = _shape(logits)
    if kwargs or not sizes or not all(isinstance(size, int) for size in sizes) or not whole.numel():
        return NotImplemented
    last = sizes[-1]
    if last == -1:
        known = 1
        for size in sizes[:-1]:
            known *= size
        last = whole.numel() // known if known > 0 and whole.numel() % known == 0 else 0
    if last != whole[-1]:
        return NotImplemented
    part = _part(logits)
    leading = list(sizes[:-1])
    if -1 in leading:
        known = last
        for size in leading:
            known *= size if size != -1 else 1
        leading[leading.index(-1)] = whole.numel() // known
    return _like(func(part, (*leading, part.shape[-1])), logits)


def _flatten(func: Any, logits: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    dims = _part(logits).dim()
    if not 0 <= start_dim % dims <= end_dim % dims < dims - 1:
        return NotImplemented
    return _like(func(_part(logits), start_dim, end_dim), logits)


def _item(func: Any, logits: Any, index: Any) -> Any:
    """Indexing that leaves the last dimension as it is."""
    part = _part(logits)
    entries = index if isinstance(index, tuple) else (index,)
    if not all(entry is Ellipsis or isinstance(entry, int | slice) for entry in entries):
        return NotImplemented
    given = len([entry for entry in entries if entry is not Ellipsis])
    if Ellipsis in entries:
        at = entries.index(Ellipsis)
        entries = (*entries[:at], *[slice(None)] * (part.dim() - given), *entries[at + 1 :])
    if len(entries) == part.dim():
        if entries[-1] != slice(None):
            return NotImplemented
    elif len(entries) > part.dim():
        return NotImplemented
    return _like(func(part, entries), logits)


def _cross_entropy(
    func: Any,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    usual = weight is None and size_average is None and reduce is None
    if not isinstance(input, SplitLogits) or isinstance(target, SplitLogits) or not usual:
        return NotImplemented
    part = _part(input)
    if part.dim() != 2 or target.shape != part.shape[:1] or target.is_floating_point():
        return NotImplemented
    layout = input.layout_of_ranks
    return split_cross_entropy(
        part,
        target,
        layout.group,
        layout.split,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        name=f"{layout.layer} cross_entropy",
    )


_METADATA = (
    *(
        getattr(Tensor, name).__get__
        for name in (
            *("device", "dtype", "layout", "ndim", "is_cuda", "is_sparse"),
            *("requires_grad", "grad_fn", "is_leaf", "_version"),
        )
    ),
    Tensor.dim,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.is_inference,
    torch.is_floating_point,
    torch.is_complex,
    Tensor.element_size,
    Tensor.get_device,
)
_ELEMENTWISE = (
    Tensor.float,
    Tensor.double,
    Tensor.to,
    Tensor.contiguous,
    Tensor.clone,
    Tensor.detach,
    Tensor.mul,
    Tensor.div,
    Tensor.__mul__,
    Tensor.__rmul__,
    Tensor.__truediv__,
)
_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    Tensor.shape.__get__: lambda func, logits: _shape(logits),  # type: ignore[attr-defined]
    Tensor.size: _size,
    Tensor.numel: lambda func, logits: _shape(logits).numel(),
    Tensor.__len__: lambda func, logits: _shape(logits)[0],
    Tensor.view: _view,
    Tensor.reshape: _view,
    Tensor.flatten: _flatten,
    Tensor.__getitem__: _item,
    **dict.fromkeys(_METADATA, _plain),
    **dict.fromkeys(_ELEMENTWISE, _each),
}
