"""Logits that are split over the vocabulary and behave like whole ones.

``F.cross_entropy`` computes the loss of the parts, and never gathers them. Operations on the other dimensions work on
the parts. Any other operation gets the whole tensor, which is gathered for it::

    logits = model(x)                           each rank has (batch, tokens, vocabulary / N)
    logits[:, :-1].reshape(-1, vocabulary)      still in parts
    F.cross_entropy(..., targets)               in parts
    logits.argmax(-1)                           gathered

In-place operations change the parts: those on each element by itself at once, any other one (``logits[..., 0] = x``) on
the gathered tensor, of which each rank then takes its part. Views along the vocabulary are views of a gathered tensor:
who changes those, and then uses the logits, gets an error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from lightning_multigpu.engine.tensor_split.cross_entropy import split_cross_entropy
from lightning_multigpu.engine.tensor_split.layers import gather_last, split_last
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


class _View(NamedTuple):
    """A view of gathered logits that was given out.

    Attributes:
        operation: that gave it.
        counter: an empty tensor with the version counter that the view and its own views count in.
        version: of the view when it was given out.
        storage: of the gathered logits, which lives as long as a view does.
    """

    operation: str
    counter: Tensor
    version: int
    storage: StorageWeakRef


class SplitLogits(Tensor):
    """This rank's part (..., classes / N) of logits, which shows the shape of the whole; make it with :meth:`of`."""

    layout_of_ranks: LogitsLayout
    gathered_views: list[_View]
    """Of these logits, and of others with the same memory."""

    @classmethod
    def of(cls, part: Tensor, layout: LogitsLayout) -> SplitLogits:
        """Logits of this rank's part (..., classes / N)."""
        logits = part.as_subclass(cls)
        logits.layout_of_ranks, logits.gathered_views = layout, []
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
            gathering = _Gathering(func)
            result = func(*gathering.whole(args), **gathering.whole(kwargs))
            return gathering.end(result)


def _part(logits: SplitLogits, *, changes: str = "") -> Tensor:
    """This rank's part; ``changes`` names the operation that is about to change it.

    Raises:
        RuntimeError: a view along the vocabulary was changed, or would have to change with the part.
    """
    for view in logits.gathered_views:
        if view.counter._version != view.version or (changes and not view.storage.expired()):  # type: ignore[no-untyped-call]
            name = logits.layout_of_ranks.layer
            raise RuntimeError(
                f"{changes or view.operation} in place: the logits of {name} are split over the vocabulary, and what "
                f"{view.operation} has given is a view of a gathered copy, which does not change with them. Change "
                f"the logits themselves before {view.operation}, as in logits[..., 0] = value, or use an operation "
                "that returns a new tensor, such as masked_fill"
            )
    return logits.as_subclass(Tensor)


def _like(part: Tensor, logits: SplitLogits) -> SplitLogits:
    like = SplitLogits.of(part, logits.layout_of_ranks)
    if _have_one_storage(part, logits):
        like.gathered_views = logits.gathered_views
    return like


def _have_one_storage(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def _counting_versions() -> AbstractContextManager[Any]:
    """Within the block tensors count their versions, as those of inference mode do not."""
    if not torch.is_inference_mode_enabled():
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


class _Gathering:
    """The whole logits for an operation that is not done on parts."""

    def __init__(self, func: Any) -> None:
        self._func = func
        self._operation: str = getattr(func, "__name__", str(func))
        self._gathered: list[tuple[SplitLogits, Tensor, int]] = []

    def whole(self, value: Any) -> Any:
        """An argument with whole logits in it."""
        if isinstance(value, SplitLogits):
            layout = value.layout_of_ranks
            layout.on_gather(layout.layer, self._operation)
            name = f"{layout.layer} gathered"
            with _counting_versions():
                whole = gather_last(_part(value), layout.group, layout.split, name)
            self._gathered.append((value, whole, whole._version))
            return whole
        if isinstance(value, list | tuple):
            found = [self.whole(each) for each in value]
            return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
        if isinstance(value, dict):
            return {key: self.whole(each) for key, each in value.items()}
        return value

    def end(self, result: Any) -> Any:
        """The operation's result; logits that it has changed in place get the new values."""
        for logits, whole, version in self._gathered:
            if whole._version != version:
                layout = logits.layout_of_ranks
                name = f"{layout.layer} {self._operation}"
                _part(logits, changes=self._operation).copy_(split_last(whole, layout.group, layout.split, name))
                if result is whole:
                    return logits
            for each in result if isinstance(result, list | tuple) else (result,):
                if isinstance(each, Tensor) and _have_one_storage(each, whole):
                    counter = each.detach()
                    counter.data = torch.empty(0)  # keeps the counter, and not the memory
                    storage = StorageWeakRef(whole.untyped_storage())  # type: ignore[no-untyped-call]
                    logits.gathered_views.append(_View(self._operation, counter, each._version, storage))
        return result


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


def _each_in_place(func: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
    """Operations that change each element by itself."""
    if not isinstance(logits, SplitLogits) or any(isinstance(arg, Tensor) for arg in (*args, *kwargs.values())):
        return NotImplemented
    func(_part(logits, changes=func.__name__), *args, **kwargs)
    return logits


def _refused(func: Any, logits: SplitLogits, *args: Any, **kwargs: Any) -> Any:
    """Operations on a tensor's memory, or its place in the graph."""
    name = logits.layout_of_ranks.layer
    raise RuntimeError(
        f"{func.__name__} on the logits of {name}, which are split over the vocabulary: it would see a rank's part; "
        "gather them first, by logits = torch.clone(logits), and go on with these"
    )


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
    Tensor.data.__get__,  # type: ignore[attr-defined]
    Tensor.mul,
    Tensor.div,
    Tensor.__mul__,
    Tensor.__rmul__,
    Tensor.__truediv__,
)
_ELEMENTWISE_IN_PLACE = (Tensor.mul_, Tensor.div_, Tensor.__imul__, Tensor.__itruediv__)
_OF_THE_GRAPH = (
    *(Tensor.register_hook, Tensor.retain_grad, Tensor.detach_),
    *(Tensor.set_, Tensor.resize_, Tensor.data.__set__),  # type: ignore[attr-defined]
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
    **dict.fromkeys(_ELEMENTWISE_IN_PLACE, _each_in_place),
    **dict.fromkeys(_OF_THE_GRAPH, _refused),
}
