"""Parts of tensors: each rank holds one, and to code it is the whole tensor.

What lies between a column layer and a row layer is a :class:`SplitTensor`, of the shape of the whole tensor. An
operation that is right on parts works on this rank's part; any other one gets the whole tensor, which all ranks gather
for it::

    hidden = up(x)                        (batch, tokens, hidden), of which a rank holds (batch, tokens, hidden / N)
    F.gelu(hidden) * scale                on parts: each element by itself
    hidden.view(b, t, heads, -1)          on parts: whole heads stay on a rank
    down(hidden)                          on parts: the row layer sums over the ranks
    F.normalize(hidden, dim=-1)           gathered; down() then takes this rank's part of the result

A whole tensor that takes part in an operation on parts gets the sum of its gradients over the ranks. Random numbers for
a part differ between ranks. Operations in place change the parts, also those that are computed on a gathered tensor;
who changes a view of a gathered tensor, and then uses the part, gets an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.nn import functional as F

from lightning_multigpu import _torch_compat
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.tensor_split.cross_entropy import split_cross_entropy
from lightning_multigpu.engine.tensor_split.parameter_split import ParameterSplit
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup

_MOST_OWNERS = 1 << 22
"""Elements that are looked at to find what a view does with a split dimension."""

Ranges = tuple[tuple[tuple[int, int], ...], ...]
"""Of each rank, the entries along a dimension that it has; see :class:`.ParameterSplit`."""


class PartLayout(NamedTuple):
    """Who holds which part of a tensor.

    Attributes:
        split: the dimension that is split, and the entries of each rank.
        group: the ranks.
        layer: the name of the layer that has made the part, for the meter.
    """

    split: ParameterSplit
    group: TensorGroup
    layer: str

    def at(self, dim: int, ranges: Ranges | None = None) -> PartLayout:
        """The placement along another dimension."""
        return PartLayout(ParameterSplit(dim, ranges or self.split.ranges), self.group, self.layer)


class _View(NamedTuple):
    """A view of a gathered tensor that was given out.

    Attributes:
        operation: that gave it.
        counter: an empty tensor with the version counter that the view and its own views count in.
        version: of the view when it was given out.
        storage: of the gathered tensor, which lives as long as a view does.
    """

    operation: str
    counter: Tensor
    version: int
    storage: StorageWeakRef

    def is_changed(self) -> bool:
        return bool(self.counter._version != self.version)


class SplitTensor(Tensor):
    """This rank's part of a tensor, which shows the shape of the whole; make it with :meth:`of`."""

    placed: PartLayout
    gathered_views: list[_View]
    """Of this part, and of others with the same memory."""
    source: Tensor
    """Of a gradient: the parameter's own, whose values an assignment replaces, as Module.to does."""

    @classmethod
    def of(cls, local: Tensor, placed: PartLayout) -> Any:
        """A part of this rank's values; of a placeholder, one in the shape of the whole."""
        if isinstance(local, Placeholder):
            return local.resized(placed.split.whole_shape(local))
        part = local.as_subclass(cls)
        part.placed, part.gathered_views = placed, []
        return part

    @classmethod
    def again(cls, value: Any, placed: PartLayout | None) -> Any:
        """A part of values that were kept without their placement; without one, the value."""
        return value if placed is None else cls.of(value, placed)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if SplitParameter in types and _shows_parts((*args, *kwargs.values())):
                return func(*args, **kwargs)
            rule = _rule(func)
            if rule is not None:
                result = rule(func, args, kwargs)
                if result is not NotImplemented:
                    return result
            gathering = _Gathering(func)
            result = func(*gathering.whole(args), **gathering.whole(kwargs))
            return gathering.end(result)


class SplitParameter(SplitTensor, Parameter):
    """A parameter of which each rank holds a part, and which reads, and can be changed, as the whole one.

    So do its gradient and its data. The optimizer's step, and this package's own code, see the part: they run within
    :meth:`.TensorGroup.showing` or ``torch._C.DisableTorchFunctionSubclass``.
    """

    def __deepcopy__(self, memo: Any) -> SplitParameter:
        if id(self) not in memo:
            copy: Any = Parameter(local(self).detach().clone(), self.requires_grad)
            vars(copy).update({name: value for name, value in vars(self).items() if name != "gathered_views"})
            place(copy, self.placed)
            memo[id(self)] = copy
        return memo[id(self)]  # type: ignore[no-any-return]


def place(parameter: Parameter, placed: PartLayout) -> None:
    """Makes a parameter that is cut a :class:`SplitParameter`, in place."""
    parameter.__class__ = SplitParameter
    parameter.placed, parameter.gathered_views = placed, []  # type: ignore[attr-defined]


def forget_place(parameter: Parameter) -> None:
    """The parameter is an ordinary one again."""
    if isinstance(parameter, SplitParameter):
        parameter.__class__ = Parameter  # type: ignore[assignment]
        del parameter.placed, parameter.gathered_views


def _shows_parts(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, SplitParameter):
            return value.placed.group.shows_parts
        if isinstance(value, list | tuple) and _shows_parts(value):
            return True
    return False


def local(value: Any) -> Any:
    """The plain tensor with this rank's values of a part; anything else as it is."""
    with torch._C.DisableTorchFunctionSubclass():
        return _local(value) if isinstance(value, SplitTensor) else value


def whole(value: Any) -> Any:
    """The gathered tensor of a part, a collective; anything else as it is."""
    if not isinstance(value, SplitTensor):
        return value
    split, group, layer = value.placed
    return whole_of(local(value), split, group, f"{layer} gathered").contiguous()


def whole_of(part: Tensor, split: ParameterSplit, group: TensorGroup, name: str) -> Tensor:
    """The whole tensor of which each rank has a part; in backward each rank takes its part of the gradient.

    One all-gather in forward, nothing in backward: all ranks have to compute the same with the whole tensor.
    """
    gathered: Tensor = _Gather.apply(part, split, group, name)  # type: ignore[no-untyped-call]
    return gathered


def own_of(tensor: Tensor, split: ParameterSplit, group: TensorGroup, name: str) -> Tensor:
    """This rank's part of a tensor that all ranks have; in backward the gradient is gathered."""
    own: Tensor = _Own.apply(tensor, split, group, name)  # type: ignore[no-untyped-call]
    return own


def entered(tensor: Tensor, group: TensorGroup, name: str) -> Tensor:
    """The tensor itself; in backward its gradient is summed over the ranks."""
    result: Tensor = _Enter.apply(tensor, group, name)  # type: ignore[no-untyped-call]
    return result


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, split: ParameterSplit, group: TensorGroup, name: str) -> Tensor:
        ctx.split, ctx.rank = split, group.rank
        return split.gather(part.detach(), group, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.split.part(gradient, ctx.rank), None, None, None


class _Own(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split: ParameterSplit, group: TensorGroup, name: str) -> Tensor:
        ctx.split, ctx.group, ctx.layer_name = split, group, name
        return split.part(tensor, group.rank)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.split.gather(gradient, ctx.group, ctx.layer_name).contiguous(), None, None, None


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, name: str) -> Tensor:
        ctx.group, ctx.layer_name = group, name
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.group.all_reduce(gradient.clone(memory_format=torch.contiguous_format), ctx.layer_name), None, None


def user_line() -> str:
    """The file and line of the user's code that is running."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_USERS:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_NOT_USERS = ("torch", "lightning_multigpu", "lightning", "pytorch_lightning", "contextlib", "functools")


# Operations on whole tensors


def _local(part: Tensor, *, changes: str = "") -> Tensor:
    """This rank's values; ``changes`` names the operation that is about to change them.

    Raises:
        RuntimeError: a view of a gathered tensor was changed, or would have to change with the part.
    """
    for view in part.gathered_views:  # type: ignore[attr-defined]
        if view.is_changed() or (changes and not view.storage.expired()):
            raise RuntimeError(
                f"{changes or view.operation} in place: the output of {part.placed.layer} is split over the ranks, and "  # type: ignore[attr-defined]
                f"what {view.operation} has given is a view of a gathered copy, which does not change with it. Change "
                f"the tensor itself before {view.operation}, as in hidden[..., 0] = value, or use an operation that "
                "returns a new tensor, such as masked_fill"
            )
    return part.as_subclass(Tensor)


def _like(result: Tensor, part: Any, placed: PartLayout | None = None) -> SplitTensor:
    like: SplitTensor = SplitTensor.of(result, placed or part.placed)
    if part.gathered_views and _have_one_storage(result, part):
        like.gathered_views = part.gathered_views
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
    """The whole tensors for an operation that is not done on parts."""

    def __init__(self, func: Any) -> None:
        self._operation: str = getattr(func, "__name__", str(func))
        self._gathered: list[tuple[SplitTensor, Tensor, int]] = []

    def whole(self, value: Any) -> Any:
        """An argument with whole tensors in it."""
        if isinstance(value, SplitTensor):
            split, group, layer = value.placed
            group.on_gather(layer, self._operation)
            group.agree_on_read(f"{self._operation} of values of {layer} ({user_line()})")
            with _counting_versions():
                gathered = whole_of(_local(value), split, group, f"{layer} gathered").contiguous()
            self._gathered.append((value, gathered, gathered._version))
            return gathered
        if isinstance(value, list | tuple):
            found = [self.whole(each) for each in value]
            return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
        if isinstance(value, dict):
            return {key: self.whole(each) for key, each in value.items()}
        return value

    def end(self, result: Any) -> Any:
        """The operation's result; parts that it has changed in place get the new values."""
        for part, gathered, version in self._gathered:
            if gathered._version != version:
                split, group, layer = part.placed
                own = own_of(gathered, split, group, f"{layer} {self._operation}")
                _local(part, changes=self._operation).copy_(own)
                if result is gathered:
                    return part
            for each in result if isinstance(result, list | tuple) else (result,):
                if isinstance(each, Tensor) and _have_one_storage(each, gathered):
                    counter = each.detach()
                    counter.data = torch.empty(0)  # keeps the counter, and not the memory
                    storage = StorageWeakRef(gathered.untyped_storage())  # type: ignore[no-untyped-call]
                    views = part.gathered_views
                    views[:] = [view for view in views if not view.storage.expired() or view.is_changed()]  # type: ignore[no-untyped-call]
                    views.append(_View(self._operation, counter, each._version, storage))
        return result


# Operations on parts: each returns NotImplemented where it would not be right


def _shape(part: Any) -> torch.Size:
    shape = list(part.as_subclass(Tensor).shape)
    shape[part.placed.split.dim] = part.placed.split.whole_size
    return torch.Size(shape)


def _parts_in(args: Any, kwargs: Any) -> list[SplitTensor]:
    found = [each for each in args if isinstance(each, SplitTensor)]
    return found + [each for each in kwargs.values() if isinstance(each, SplitTensor)] if kwargs else found


def _are_alike(parts: Sequence[SplitTensor]) -> bool:
    """Whether the ranks hold the same entries of all parts, along the same dimension counted from the last one."""
    first = parts[0]
    split = first.placed.split
    offset = split.dim - first.as_subclass(Tensor).dim()
    return all(
        each.placed.split.ranges == split.ranges and each.placed.split.dim - each.as_subclass(Tensor).dim() == offset
        for each in parts[1:]
    )


def _fits_beside(value: Any, offset: int, split: ParameterSplit) -> bool:
    """Whether a value can be an operand beside a part that is split along the dimension ``offset`` from the end."""
    if not isinstance(value, Tensor) or isinstance(value, SplitTensor):
        return not isinstance(value, list | tuple)
    return value.dim() < -offset or value.shape[offset] in (1, split.whole_size)


def _beside(value: Any, part: SplitTensor, offset: int) -> Any:
    """What this rank needs of an operand beside a part that is split along the dimension ``offset`` from the end."""
    if isinstance(value, SplitTensor):
        return _local(value)
    if not isinstance(value, Tensor):
        return value
    split, group, layer = part.placed
    needs_grad = value.requires_grad and torch.is_grad_enabled()
    if value.dim() < -offset or value.shape[offset] == 1:
        return entered(value, group, f"operand beside {layer}") if needs_grad else value
    along = ParameterSplit(value.dim() + offset, split.ranges)
    if needs_grad:
        group.on_gather(layer, "the gradient of an operand")
        return own_of(value, along, group, f"operand beside {layer}")
    return along.part(value, group.rank)


def _each(func: Any, args: Any, kwargs: Any) -> Any:
    """Operations on each element by itself."""
    parts = _parts_in(args, kwargs)
    if not parts or kwargs.get("out") is not None or (len(parts) > 1 and not _are_alike(parts)):
        return NotImplemented
    part, name = parts[0], func.__name__
    split, group, _ = part.placed
    offset = split.dim - part.as_subclass(Tensor).dim()
    if not all(_fits_beside(each, offset, split) for each in (*args, *kwargs.values())):
        return NotImplemented
    if (name[-1] == "_" and name[-2] != "_") or name in _IN_PLACE or kwargs.get("inplace"):
        if args[0] is not part:
            return NotImplemented
        _local(part, changes=name)
    own = [_beside(each, part, offset) for each in args]
    own_kwargs = {key: _beside(each, part, offset) for key, each in kwargs.items()}
    with group.own_random(part.device) if name in _DRAWING else nullcontext():
        result = func(*own, **own_kwargs)
    if not isinstance(result, Tensor):
        return NotImplemented
    for each, given in zip(own, args, strict=True):
        if result is each:  # changed in place, or as it was
            return given
    dim = result.dim() + offset
    return _like(result, part, part.placed if dim == split.dim else part.placed.at(dim))


def _reshaped(func: Any, args: Any, kwargs: Any) -> Any:
    """Views that merge dimensions or take them apart, as long as whole entries stay on a rank."""
    if len(args) == 2 and isinstance(args[1], Tensor):  # view_as
        func, args = Tensor.reshape, (args[0], _shape(args[1]) if isinstance(args[1], SplitTensor) else args[1].shape)
    part = args[0]
    if not isinstance(part, SplitTensor) or not _are_plain(args[1:]) or not _are_plain([*kwargs.values()]):
        return NotImplemented
    split, shape = part.placed.split, _shape(part)
    sizes = [*func(torch.empty(shape, device="meta"), *args[1:], **kwargs).shape]
    found = _new_dim(split.ranges, tuple(shape), split.dim, tuple(sizes))
    if found is None:
        return NotImplemented
    dim, ranges = found
    sizes[dim] = sum(stop - start for start, stop in ranges[part.placed.group.rank])
    own = _local(part)
    result = own.view(sizes) if func is Tensor.view else own.reshape(sizes)
    return _like(result, part, part.placed.at(dim, ranges))


@lru_cache(4096)
def _new_dim(ranges: Ranges, shape: tuple[int, ...], dim: int, sizes: tuple[int, ...]) -> tuple[int, Ranges] | None:
    """The dimension along which a view is split, and each rank's entries of it; None if parts do not suffice.

    The owner of element i is that of entry ``i // inner % shape[dim]``; with the sizes of the view it has to be that of
    entry ``i // new_inner % sizes[new_dim]``, whatever the other entries are.
    """
    inner = torch.Size(shape[dim + 1 :]).numel()
    for new_dim, size in enumerate(sizes):
        if size == shape[dim] and torch.Size(sizes[new_dim + 1 :]).numel() == inner:
            return new_dim, ranges
    owners = torch.empty(shape[dim], dtype=torch.long)
    for rank, of_rank in enumerate(ranges):
        for start, stop in of_rank:
            owners[start:stop] = rank
    for new_dim, size in enumerate(sizes):
        new_inner = torch.Size(sizes[new_dim + 1 :]).numel()
        unit = min(inner, new_inner)
        if size <= 1 or not unit or max(inner, new_inner) % unit:
            continue
        period, new_period = shape[dim] * inner // unit, size * new_inner // unit
        length = max(period, new_period)
        if length % period or length % new_period or length > _MOST_OWNERS:
            continue
        of_elements = owners.repeat_interleave(inner // unit).repeat(length // period)
        by_entry = of_elements.view(-1, size, new_inner // unit)
        new_owners = by_entry[0, :, 0]
        if bool((by_entry == new_owners[None, :, None]).all()):
            return new_dim, tuple(_runs(new_owners == rank) for rank in range(len(ranges)))
    return None


def _runs(mask: Tensor) -> tuple[tuple[int, int], ...]:
    """First and one-past-last indices of the true entries."""
    edges = torch.diff(mask.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    return tuple(
        zip((edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist(), strict=True)
    )


def _moved(func: Any, args: Any, kwargs: Any) -> Any:
    """Views that move or leave out other dimensions, or take entries of the one that is split."""
    part, *others = args
    if not isinstance(part, SplitTensor) or not _are_plain(others) or not _are_plain([*kwargs.values()]):
        return NotImplemented
    split, group, _ = part.placed
    dim, shape = split.dim, _shape(part)
    before = [*shape[:dim], *shape[dim + 1 :]]
    strides = torch.empty(before, device="meta").stride()
    stride = max(1, torch.Size(before).numel())
    probe = torch.empty_strided(shape, (*strides[:dim], stride, *strides[dim:]), device="meta")
    expected = func(probe, *others, **kwargs)
    has_one = isinstance(expected, Tensor)
    own: Any = None
    results = []
    for number, each in enumerate([expected] if has_one else expected):
        dims = [d for d in range(each.dim()) if each.stride(d) == stride and each.size(d) > 1]
        if len(dims) != 1:
            return NotImplemented
        (new_dim,), start = dims, each.storage_offset() // stride
        size = each.size(new_dim)
        if (start, size) == (0, shape[dim]):
            own = (
                func(_local(part), *_own_sizes(func, others, part, new_dim, each.dim()), **kwargs)
                if own is None
                else own
            )
            result, ranges = own if has_one else own[number], split.ranges
        elif new_dim == dim and [*each.shape[:dim], *each.shape[dim + 1 :]] == before:
            ranges = tuple(_cut(of_rank, start, start + size) for of_rank in split.ranges)
            before_it = sum(b - a for a, b in _cut(split.ranges[group.rank], 0, start))
            result = _local(part).narrow(dim, before_it, sum(b - a for a, b in ranges[group.rank]))
        else:
            return NotImplemented
        if [*result.shape[:new_dim], *result.shape[new_dim + 1 :]] != [
            *each.shape[:new_dim],
            *each.shape[new_dim + 1 :],
        ]:
            return NotImplemented
        results.append(_like(result, part, part.placed.at(new_dim, ranges)))
    return results[0] if has_one else tuple(results)


def _are_plain(values: Any) -> bool:
    return all(
        each is None or each is Ellipsis or isinstance(each, int | slice | str)
        or (isinstance(each, list | tuple) and _are_plain(each))
        for each in values
    )  # fmt: skip


def _own_sizes(func: Any, args: Any, part: SplitTensor, dim: int, num_dims: int) -> Any:
    """The arguments of ``expand`` with this rank's size."""
    if func is not Tensor.expand:
        return args
    sizes = [*(args[0] if len(args) == 1 and not isinstance(args[0], int) else args)]
    sizes[dim] = -1
    return sizes


def _cut(of_rank: Sequence[tuple[int, int]], start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """A rank's entries among those from ``start`` to ``stop``, counted from there."""
    found = ((max(a, start) - start, min(b, stop) - start) for a, b in of_rank)
    return tuple((a, b) for a, b in found if a < b)


def _along_others(func: Any, args: Any, kwargs: Any) -> Any:
    """Operations along dimensions, none of which is split."""
    part, place = args[0], _PLACES.get(func.__name__, 1)
    dims = kwargs.get("dim", args[place] if len(args) > place else 1 if func is F.normalize else None)
    if not isinstance(part, SplitTensor) or kwargs.get("out") is not None or len(_parts_in(args, kwargs)) > 1:
        return NotImplemented
    own, dim = _local(part), part.placed.split.dim
    if type(dims) is int:
        dims = (dims,)
    if not isinstance(dims, list | tuple) or not dims or dim in (gone := {each % own.dim() for each in dims}):
        return NotImplemented
    result = func(own, *args[1:], **kwargs)
    if not isinstance(result, Tensor):
        return NotImplemented
    kept = result.dim() == own.dim()
    return _like(result, part, part.placed.at(dim if kept else dim - sum(each < dim for each in gone)))


def _normed(func: Any, args: Any, kwargs: Any) -> Any:
    """Norms over the last dimensions, with whole weights."""
    if len(args) < 2:
        return NotImplemented
    part, shape, *others = args
    if not isinstance(part, SplitTensor) or part.placed.split.dim >= part.as_subclass(Tensor).dim() - len(shape):
        return NotImplemented
    return _with_whole(func, part, (shape, *others), kwargs)


def _linear(func: Any, args: Any, kwargs: Any) -> Any:
    """A whole linear layer on parts of rows."""
    part, *others = args or [None]
    if not isinstance(part, SplitTensor) or part.placed.split.dim == part.as_subclass(Tensor).dim() - 1:
        return NotImplemented
    return _with_whole(func, part, others, kwargs)


def _with_whole(func: Any, part: SplitTensor, args: Any, kwargs: Any) -> Any:
    if _parts_in(args, kwargs):
        return NotImplemented

    def whole_(value: Any) -> Any:
        return _beside(value, part, -sys.maxsize)

    return _like(func(_local(part), *map(whole_, args), **{k: whole_(v) for k, v in kwargs.items()}), part)


def _heads(func: Any, args: Any, kwargs: Any) -> Any:
    """Products and attention of matrices, of which each rank has some; a head's, for example."""
    parts = _parts_in(args, kwargs)
    if (
        not parts
        or kwargs.get("out") is not None
        or not (_are_alike(parts) or (kwargs.get("enable_gqa") and _share_heads(parts)))
    ):
        return NotImplemented
    part = parts[0]
    split, group, _ = part.placed
    offset = split.dim - part.as_subclass(Tensor).dim()
    given = [*args, *kwargs.values()]
    if offset > -3 or not all(_fits_beside(each, offset, split) for each in given):
        return NotImplemented
    if any(isinstance(each, Tensor) and each.dim() < 2 for each in given):
        return NotImplemented
    own = [_beside(each, part, offset) for each in args]
    own_kwargs = {key: _beside(each, part, offset) for key, each in kwargs.items()}
    if func is not F.scaled_dot_product_attention:
        result = func(*own, **own_kwargs)
    else:
        if not _torch_compat.ATTENDS_WITHOUT_HEADS and not all(split.ranges):
            return NotImplemented
        q, k, v, *_ = (*own, *(own_kwargs[name] for name in ("query", "key", "value") if name in own_kwargs))
        with group.own_random(q.device) if (own[4] if len(own) > 4 else kwargs.get("dropout_p")) else nullcontext():
            result = func(*own, **own_kwargs) if q.shape[offset] else q @ k.transpose(-2, -1) @ v
    return _like(result, part, part.placed.at(result.dim() + offset))


def _share_heads(parts: Sequence[SplitTensor]) -> bool:
    """Whether each rank has the heads of keys and values that its heads of queries share."""
    if len(parts) != 3 or not _are_alike(parts[1:]):
        return False
    queries, keys = (each.placed.split for each in parts[:2])
    share = queries.whole_size // keys.whole_size
    shared = tuple(tuple((a * share, b * share) for a, b in of_rank) for of_rank in keys.ranges)
    return queries.ranges == shared and queries.dim == keys.dim


def _joined(func: Any, args: Any, kwargs: Any) -> Any:
    """Concatenation of parts along another dimension; an empty cache may stand before them."""
    tensors = [each for each in (args[0] if args else kwargs["tensors"]) if tuple(each.shape) != (0,)]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if (
        not all(isinstance(each, SplitTensor) for each in tensors)
        or not _are_alike(tensors)
        or not isinstance(dim, int)
    ):
        return NotImplemented
    part = tensors[0]
    at, num_dims = part.placed.split.dim, part.as_subclass(Tensor).dim()
    if any(each.as_subclass(Tensor).dim() != num_dims for each in tensors):
        return NotImplemented
    if func is torch.stack:
        at += dim % (num_dims + 1) <= at
    elif dim % num_dims == at:
        return NotImplemented
    return _like(func([_local(each) for each in tensors], dim), part, part.placed.at(at))


def _dropped(func: Any, args: Any, kwargs: Any) -> Any:
    """Dropout, which differs between ranks."""
    part = args[0] if args else kwargs.get("input")
    if not isinstance(part, SplitTensor):
        return NotImplemented
    kwargs = {**dict(zip(("p", "training", "inplace"), args[1:], strict=False)), **kwargs}
    args = (part,)
    kwargs.pop("input", None)
    if func is torch.dropout:
        kwargs["train"] = kwargs.pop("training", True)
    if not kwargs.get("training", kwargs.get("train", func is not F.alpha_dropout)):
        return _each(func, args, kwargs)
    with part.placed.group.own_random(part.device):
        return _each(func, args, kwargs)


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """The loss of logits that are split over classes."""
    usual = weight is None and size_average is None and reduce is None
    if not isinstance(input, SplitTensor) or isinstance(target, SplitTensor) or not usual:
        return NotImplemented
    part, (split, group, layer) = input.as_subclass(Tensor), input.placed
    is_usual_shape = part.dim() == 2 and split.dim == 1 and target.shape == part.shape[:1]
    if not is_usual_shape or target.is_floating_point() or any(len(of_rank) > 1 for of_rank in split.ranges):
        return NotImplemented
    return split_cross_entropy(
        _local(input),
        target,
        group,
        split,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        name=f"{layer} cross_entropy",
    )


def _size(part: Any, dim: int | None = None) -> Any:
    return _shape(part) if dim is None else _shape(part)[dim]


def _stride(part: Any, dim: int | None = None) -> Any:
    strides = torch.empty(_shape(part), device="meta").stride()
    return strides if dim is None else strides[dim]


def _plain(func: Any, args: Any, kwargs: Any) -> Any:
    """What a part has in common with the whole, or its memory."""
    return func(*args, **kwargs) if isinstance(args[0], SplitTensor) else NotImplemented


def _of_owner(func: Any, args: Any, kwargs: Any) -> Any:
    """A gradient, or the values; the owner knows the views that are given of them."""
    found = func(*args)
    if found is None:
        return None
    part = SplitTensor.of(found, args[0].placed)
    if isinstance(part, SplitTensor):
        part.gathered_views, part.source = args[0].gathered_views, found
    return part


def _gradients(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.autograd.grad``: the gradient of a part is one."""
    given = {**dict(zip(("outputs", "inputs"), args[:2], strict=False)), **kwargs}
    outputs, inputs = ([each] if isinstance(each, Tensor) else [*each] for each in (given["outputs"], given["inputs"]))
    if any(isinstance(each, SplitTensor) for each in outputs):
        return NotImplemented
    found = zip(func(*args, **kwargs), inputs, strict=True)
    return tuple(g if g is None or not isinstance(x, SplitTensor) else SplitTensor.of(g, x.placed) for g, x in found)


def _assigned(func: Any, args: Any, kwargs: Any) -> Any:
    """A parameter's gradient or values, or a gradient's values, are assigned: each rank takes its part."""
    owner, value = args
    target = owner if isinstance(owner, SplitParameter) else vars(owner).get("source")
    if target is None:
        return _refused(func, args, kwargs)
    split, group, _ = owner.placed
    if isinstance(value, SplitTensor):
        value = _local(value)
    elif isinstance(value, Tensor) and not isinstance(value, Placeholder):
        value = split.part(value, group.rank)
    return func(target, value)


def _hooked(func: Any, args: Any, kwargs: Any) -> Any:
    """A hook on a parameter gets its gradient as a part, and may return one, or a whole one."""
    owner, hook = args
    if not isinstance(owner, SplitParameter):
        return _refused(func, args, kwargs)
    placed = owner.placed

    def hook_of_part(gradient: Tensor) -> Any:
        found = hook(SplitTensor.of(gradient, placed))
        is_whole = isinstance(found, Tensor) and not isinstance(found, SplitTensor)
        return placed.split.part(found, placed.group.rank) if is_whole else local(found)

    return func(owner, hook_of_part)


def _drawn(func: Any, args: Any, kwargs: Any) -> Any:
    """Random numbers in the shape of the whole, as on one device."""
    part = args[0]
    split, group, _ = part.placed
    drawn = func(torch.empty(_shape(part), dtype=part.dtype, device=part.device), *args[1:], **kwargs)
    return SplitTensor.of(split.part(drawn, group.rank), part.placed)


def _lists(func: Any, args: Any, kwargs: Any) -> Any:
    """Operations on each element of the tensors in lists."""
    lists = [each for each in args if isinstance(each, list | tuple) and any(isinstance(t, Tensor) for t in each)]
    for beside in zip(*lists, strict=True):
        are_parts = [isinstance(t, SplitTensor) for t in beside]
        if any(are_parts) and not (all(are_parts) and _are_alike(beside)):
            return NotImplemented
    own = [
        [_local(t) if isinstance(t, SplitTensor) else t for t in a] if isinstance(a, list | tuple) else a for a in args
    ]
    results = func(*own, **kwargs)
    if not isinstance(results, list | tuple):
        return results
    return [_like(t, part) if isinstance(part, SplitTensor) else t for t, part in zip(results, lists[0], strict=True)]


def _refused(func: Any, args: Any, kwargs: Any) -> Any:
    """Operations on a tensor's memory, or its place in the graph."""
    raise RuntimeError(
        f"{func.__name__} on the output of {args[0].placed.layer}, which is split over the ranks: it would see a "
        f"rank's part; go on with trainer.strategy.whole(tensor), which gathers it on all ranks ({user_line()})"
    )


def _of_leaf(func: Any, args: Any, kwargs: Any) -> Any:
    """What is the same for a part of a parameter, and is refused for what is computed."""
    return func(*args, **kwargs) if isinstance(args[0], SplitParameter) else _refused(func, args, kwargs)


def _of(rule: Callable[..., Any]) -> Callable[[Any, Any, Any], Any]:
    return lambda func, args, kwargs: rule(*args, **kwargs)


_IN_PLACE = frozenset({"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__", "__ior__"})
_DRAWING = frozenset({"bernoulli", "rrelu"})
_EACH = frozenset(
    {
        "float",
        "double",
        "half",
        "bfloat16",
        "to",
        "type_as",
        "cpu",
        "cuda",
        "contiguous",
        "detach",
        "zero",
        "fill",
        "copy",
    }
    | {"zeros_like", "ones_like", "empty_like", "full_like", "hardswish", "logsigmoid", "softsign", "tanhshrink"}
    | {"truediv", "rtruediv", "radd", "rmul", "rpow", "rdiv", "floor_divide", "floordiv", "mod", "and", "or", "xor"}
    | {"invert", "bernoulli", "rrelu", "alpha_dropout"}
)
"""Operations on each element, by their names without underscores, that torch does not mark as pointwise."""
_NOT_EACH = frozenset({"max", "min", "frexp"})
_ALONG = frozenset(
    {"sum", "mean", "amax", "amin", "var", "std", "prod", "logsumexp", "argmax", "argmin", "all", "any", "softmax"}
    | {"log_softmax", "cumsum", "cumprod", "normalize"}
)
_PLACES = {"normalize": 2}
_MOVES = frozenset(
    {"transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "unsqueeze", "squeeze", "select", "narrow"}
    | {"chunk", "split", "split_with_sizes", "tensor_split", "unbind", "t", "expand", "__getitem__", "adjoint"}
)
_RESHAPES = frozenset({"view", "view_as", "reshape", "reshape_as", "flatten", "unflatten"})
_METADATA = frozenset(
    {
        "dim",
        "ndimension",
        "_has_compatible_shallow_copy_type",
        "is_floating_point",
        "is_complex",
        "is_inference",
        "element_size",
        "get_device",
    }
    | {"is_contiguous", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "is_pinned", "untyped_storage"}
)


@cache
def _is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name in _NOT_EACH:
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


@cache
def _rule(func: Any) -> Callable[[Any, Any, Any], Any] | None:
    """What computes an operation on parts; None if it always needs whole tensors."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        return _of_attribute(func.__self__.__name__)
    if name == "__set__":
        return _assigned if func.__self__.__name__ in ("grad", "data") else _of_leaf
    if name.startswith("_foreach_"):
        return _lists if _is_pointwise(name[len("_foreach_") :].strip("_")) else None
    bare = name.strip("_")
    for names, rule in _BY_NAME:
        if name in names:
            return rule
    is_each = (
        bare in _EACH or _is_pointwise(bare) or (name in _IN_PLACE and (_is_pointwise(bare[1:]) or bare[1:] in _EACH))
    )
    return _each if is_each else None


def _of_attribute(name: str) -> Callable[[Any, Any, Any], Any] | None:
    if name == "shape":
        return _of(_shape)
    if name in ("T", "mT", "H", "mH"):
        return _moved
    if name in ("grad", "data"):
        return _of_owner
    if name == "nbytes":
        return _of(lambda part: _shape(part).numel() * part.element_size())
    return None if name in ("real", "imag") else _plain


_BY_NAME: tuple[tuple[Any, Callable[[Any, Any, Any], Any]], ...] = (
    (("size",), _of(_size)),
    (("stride",), _of(_stride)),
    (("numel", "nelement"), lambda func, args, kwargs: _shape(args[0]).numel()),
    (("__len__",), lambda func, args, kwargs: _shape(args[0])[0]),
    (("__hash__",), lambda func, args, kwargs: id(args[0])),
    (("__iter__",), lambda func, args, kwargs: iter(torch.unbind(*args))),
    (("cross_entropy",), _of(_cross_entropy)),
    (("matmul", "__matmul__", "bmm", "scaled_dot_product_attention"), _heads),
    (("cat", "concat", "concatenate", "stack"), _joined),
    (("layer_norm", "rms_norm"), _normed),
    (("linear",), _linear),
    (("dropout", "alpha_dropout"), _dropped),
    (_ALONG, _along_others),
    (_MOVES, _moved),
    (_RESHAPES, _reshaped),
    (_METADATA, _plain),
    (("register_hook",), _hooked),
    (("grad",), _gradients),
    (("requires_grad_", "retain_grad", "register_post_accumulate_grad_hook"), _of_leaf),
    (("rand_like", "randn_like", "randint_like"), _drawn),
    (("detach_", "set_", "resize_"), _refused),
)
