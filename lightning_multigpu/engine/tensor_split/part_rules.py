"""Rules of operations on parts: which operation is right on a rank's part, and which gets the whole tensor.

A rule computes an operation on parts, or returns NotImplemented where parts would not be right. :func:`rule_of` has the
table: a rule by the names of its operations, and one for all operations that torch marks as pointwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.tensor_split.cross_entropy import split_cross_entropy
from lightning_multigpu.engine.tensor_split.parameter_split import ParameterSplit
from lightning_multigpu.engine.tensor_split.parts import (
    Ranges,
    SplitParameter,
    SplitTensor,
    entered,
    local,
    own_of,
    own_values,
    part_like,
    user_line,
)

Rule = Callable[[Any, Any, Any], Any]
"""Takes a function, its arguments, and its keywords."""

_MOST_OWNERS = 1 << 22
"""Elements that are looked at to find what a view does with a split dimension."""


def _shape(part: Any) -> torch.Size:
    return torch.Size(part.placed.split.whole_shape(part.as_subclass(Tensor)))


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
        return own_values(value)
    if not isinstance(value, Tensor):
        return value
    split, group, layer = part.placed
    needs_grad = value.requires_grad and torch.is_grad_enabled()
    if value.dim() < -offset or value.shape[offset] == 1:
        return entered(value, group, f"operand beside {layer}") if needs_grad else value
    along = part.placed.at(value.dim() + offset)
    if needs_grad:
        if value.numel() > split.whole_size:  # else it is a weight for each entry
            group.on_gather(layer, "the gradient of an operand")
        return own_of(value, along, f"operand beside {layer}")
    return along.own(value)


def _own_arguments(args: Any, kwargs: Any, part: SplitTensor, offset: int) -> tuple[list[Any], dict[str, Any]]:
    return [_beside(each, part, offset) for each in args], {k: _beside(v, part, offset) for k, v in kwargs.items()}


def _taken(
    args: Any, kwargs: Any, num_mixed: int = 0, fit: Callable[[Sequence[SplitTensor]], bool] = _are_alike
) -> tuple[SplitTensor, int] | None:
    """A part of those that fit, one that was computed before a held one, and its dimension from the end.

    None if an operation cannot run on parts: it mixes entries along the last ``num_mixed`` dimensions, and no others.
    """
    parts = _parts_in(args, kwargs)
    if not parts or kwargs.get("out") is not None or (len(parts) > 1 and not fit(parts)):
        return None
    split, given = parts[0].placed.split, (*args, *kwargs.values())
    offset = split.dim - parts[0].as_subclass(Tensor).dim()
    if offset >= -num_mixed or not all(_fits_beside(each, offset, split) for each in given):
        return None
    if num_mixed and any(isinstance(each, Tensor) and each.dim() < num_mixed for each in given):
        return None
    return next((each for each in parts if not each.is_held), parts[0]), offset


def _each(func: Any, args: Any, kwargs: Any) -> Any:
    """Operations on each element by itself."""
    taken, name = _taken(args, kwargs), func.__name__
    if taken is None:
        return NotImplemented
    part, offset = taken
    if (name[-1] == "_" and name[-2] != "_") or name in _IN_PLACE or kwargs.get("inplace"):
        if not isinstance(args[0], SplitTensor):
            return NotImplemented
        own_values(args[0], changes=name)
    own, own_kwargs = _own_arguments(args, kwargs, part, offset)
    with part.placed.group.own_random(part.device) if name in _DRAWING else nullcontext():
        result = func(*own, **own_kwargs)
    if not isinstance(result, Tensor):
        return NotImplemented
    for each, given in zip(own, args, strict=True):
        if result is each:  # changed in place, or as it was
            return given
    dim = result.dim() + offset
    return part_like(result, part, func, part.placed if dim == part.placed.split.dim else part.placed.at(dim))


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
    own = own_values(part)
    result = own.view(sizes) if func is Tensor.view else own.reshape(sizes)
    return part_like(result, part, func, part.placed.at(dim, ranges))


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
    before = _without(shape, dim)
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
            if func is Tensor.expand:
                others = [*(others[0] if len(others) == 1 and not isinstance(others[0], int) else others)]
                others[new_dim] = -1  # this rank's size
            own = func(own_values(part), *others, **kwargs) if own is None else own
            result, ranges = own if has_one else own[number], split.ranges
        elif new_dim == dim and _without(each.shape, dim) == before:
            ranges = tuple(_cut(of_rank, start, start + size) for of_rank in split.ranges)
            before_it = sum(b - a for a, b in _cut(split.ranges[group.rank], 0, start))
            result = own_values(part).narrow(dim, before_it, sum(b - a for a, b in ranges[group.rank]))
        else:
            return NotImplemented
        if _without(result.shape, new_dim) != _without(each.shape, new_dim):
            return NotImplemented
        results.append(part_like(result, part, func, part.placed.at(new_dim, ranges)))
    return results[0] if has_one else tuple(results)


def _without(shape: Sequence[int], dim: int) -> list[int]:
    return [*shape[:dim], *shape[dim + 1 :]]


def _are_plain(values: Any) -> bool:
    return all(
        each is None or each is Ellipsis or isinstance(each, int | slice | str)
        or (isinstance(each, list | tuple) and _are_plain(each))
        for each in values
    )  # fmt: skip


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
    own, dim = own_values(part), part.placed.split.dim
    if type(dims) is int:
        dims = (dims,)
    if not isinstance(dims, list | tuple) or not dims or dim in (gone := {each % own.dim() for each in dims}):
        return NotImplemented
    result = func(own, *args[1:], **kwargs)
    if not isinstance(result, Tensor):
        return NotImplemented
    kept = result.dim() == own.dim()
    return part_like(result, part, func, part.placed.at(dim if kept else dim - sum(each < dim for each in gone)))


def _rows(func: Any, args: Any, kwargs: Any) -> Any:
    """Linear layers, and norms over the last dimensions, with whole weights on parts of rows."""
    part, *others = args or (None,)
    if not isinstance(part, SplitTensor) or _parts_in(others, kwargs):
        return NotImplemented
    num_dims = part.as_subclass(Tensor).dim()
    num_last = 1 if func is F.linear else len(others[0]) if others else num_dims
    if part.placed.split.dim >= num_dims - num_last:
        return NotImplemented
    own, own_kwargs = _own_arguments(args, kwargs, part, -sys.maxsize)
    return part_like(func(*own, **own_kwargs), part, func)


def _heads(func: Any, args: Any, kwargs: Any) -> Any:
    """Products and attention of matrices, of which each rank has some; a head's, for example."""
    taken = _taken(args, kwargs, 2, _share_heads if kwargs.get("enable_gqa") else _are_alike)
    if taken is None:
        return NotImplemented
    part, offset = taken
    own, own_kwargs = _own_arguments(args, kwargs, part, offset)
    if func is not F.scaled_dot_product_attention:
        result = func(*own, **own_kwargs)
    else:
        q, k, v, *_ = (*own, *(own_kwargs[name] for name in ("query", "key", "value") if name in own_kwargs))
        draws = own[4] if len(own) > 4 else kwargs.get("dropout_p")
        with part.placed.group.own_random(q.device) if draws else nullcontext():
            # Attention without heads ends the process in torch 2.11, by a division by zero.
            result = func(*own, **own_kwargs) if q.shape[offset] else q @ k.transpose(-2, -1) @ v
    return part_like(result, part, func, part.placed.at(result.dim() + offset))


def _share_heads(parts: Sequence[SplitTensor]) -> bool:
    """Whether each rank has the heads of keys and values that its heads of queries share."""
    if _are_alike(parts):
        return True
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
    if not all(isinstance(each, SplitTensor) for each in tensors) or not isinstance(dim, int):
        return NotImplemented
    part = tensors[0]
    at, num_dims = part.placed.split.dim, part.as_subclass(Tensor).dim()
    if not _are_alike(tensors) or any(each.as_subclass(Tensor).dim() != num_dims for each in tensors):
        return NotImplemented
    if func is torch.stack:
        at += dim % (num_dims + 1) <= at
    elif dim % num_dims == at:
        return NotImplemented
    return part_like(func([own_values(each) for each in tensors], dim), part, func, part.placed.at(at))


def _dropped(func: Any, args: Any, kwargs: Any) -> Any:
    """Dropout, which differs between ranks."""
    given = {**dict(zip(("input", "p", "training", "inplace"), args, strict=False)), **kwargs}
    part = given.pop("input")
    if not isinstance(part, SplitTensor) or func is torch.dropout:
        return NotImplemented
    with part.placed.group.own_random(part.device) if given.get("training", func is F.dropout) else nullcontext():
        return _each(func, (part,), given)


def _cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    logits, target = given.pop("input"), given.pop("target")
    is_usual = all(given.pop(name, None) is None for name in ("weight", "size_average", "reduce"))
    is_usual &= given.get("reduction", "mean") in ("mean", "sum", "none")
    if not isinstance(logits, SplitTensor) or isinstance(target, SplitTensor) or not is_usual:
        return NotImplemented
    part, split = own_values(logits), logits.placed.split
    is_usual_shape = part.dim() == 2 and split.dim == 1 and target.shape == part.shape[:1]
    if not is_usual_shape or target.is_floating_point() or any(len(of_rank) > 1 for of_rank in split.ranges):
        return NotImplemented
    return split_cross_entropy(part, target, logits.placed, **given)


def _plain(func: Any, args: Any, kwargs: Any) -> Any:
    """What a part has in common with the whole, or its memory."""
    return func(*args, **kwargs) if isinstance(args[0], SplitTensor) else NotImplemented


def _of_owner(func: Any, args: Any, kwargs: Any) -> Any:
    """A gradient, or the values; the owner knows the views that are given of them."""
    found = func(*args)
    if found is None:
        return None
    part = SplitTensor.of(found, args[0].placed, is_held=args[0].is_held)
    if isinstance(part, SplitTensor):
        part.gathered_views = args[0].gathered_views
    return part


def _gradients(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.autograd.grad``: the gradient of a part is one."""
    given = {**dict(zip(("outputs", "inputs"), args[:2], strict=False)), **kwargs}
    outputs, inputs = ([each] if isinstance(each, Tensor) else [*each] for each in (given["outputs"], given["inputs"]))
    if any(isinstance(each, SplitTensor) for each in outputs):
        return NotImplemented
    return tuple(
        g if g is None or not isinstance(x, SplitTensor) else SplitTensor.of(g, x.placed, is_held=x.is_held)
        for g, x in zip(func(*args, **kwargs), inputs, strict=True)
    )


def _assigned(func: Any, args: Any, kwargs: Any) -> Any:
    """A parameter's gradient or values, or a gradient's values, are assigned: each rank takes its part."""
    owner, value = args
    if not owner.is_held:
        return _refused(func, args, kwargs)
    if isinstance(value, SplitTensor):
        value = own_values(value)
    elif isinstance(value, Tensor) and not isinstance(value, Placeholder):
        value = owner.placed.own(value)
    if isinstance(owner, SplitParameter):
        func(owner, value)
    else:
        own_values(owner, changes="an assignment").copy_(value)  # its memory is the parameter's, or the gradient's
    return owner


def _hooked(func: Any, args: Any, kwargs: Any) -> Any:
    """A hook on a parameter gets its gradient as a part, and may return one, or a whole one."""
    owner, hook = args
    if not isinstance(owner, SplitParameter):
        return _refused(func, args, kwargs)
    placed = owner.placed

    def hook_of_part(gradient: Tensor) -> Any:
        found = hook(SplitTensor.of(gradient, placed))
        is_whole = isinstance(found, Tensor) and not isinstance(found, SplitTensor)
        return placed.own(found) if is_whole else local(found)

    return func(owner, hook_of_part)


def _list_in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """A change of each element of the tensors in a list by one number, as clipping makes it."""
    tensors, *others = args
    if kwargs or any(isinstance(each, list | tuple | SplitTensor) for each in others):
        return NotImplemented
    name = func.__name__
    found = func([own_values(t, changes=name) if isinstance(t, SplitTensor) else t for t in tensors], *others)
    return None if found is None else [*tensors]


def _refused(func: Any, args: Any, kwargs: Any) -> Any:
    """Operations on a tensor's memory, or its place in the graph."""
    raise RuntimeError(
        f"{func.__name__} on the output of {args[0].placed.layer}, which is split over the ranks: it would see a "
        f"rank's part; go on with trainer.strategy.whole(tensor), which gathers it on all ranks ({user_line()})"
    )


def _of_leaf(func: Any, args: Any, kwargs: Any) -> Any:
    """What is the same for a part of a parameter, and is refused for what is computed."""
    return func(*args, **kwargs) if isinstance(args[0], SplitParameter) else _refused(func, args, kwargs)


def _of(answer: Callable[..., Any]) -> Rule:
    return lambda func, args, kwargs: answer(*args, **kwargs)


def _by_name(*rules: tuple[str, Rule]) -> dict[str, Rule]:
    return {name: rule for names, rule in rules for name in names.split()}


_BY_NAME = _by_name(
    (
        "sum mean amax amin var std prod logsumexp argmax argmin all any softmax log_softmax cumsum cumprod normalize",
        _along_others,
    ),
    (
        "transpose swapaxes swapdims permute movedim moveaxis unsqueeze squeeze select narrow chunk split "
        "split_with_sizes tensor_split unbind t expand __getitem__ adjoint",
        _moved,
    ),
    ("view view_as reshape reshape_as flatten unflatten", _reshaped),
    ("matmul __matmul__ bmm scaled_dot_product_attention", _heads),
    ("cat concat concatenate stack", _joined),
    ("linear layer_norm rms_norm", _rows),
    ("dropout alpha_dropout", _dropped),
    ("cross_entropy", _cross_entropy),
    ("size", _of(lambda part, dim=None: _shape(part) if dim is None else _shape(part)[dim])),
    ("numel nelement", _of(lambda part: _shape(part).numel())),
    ("__len__", _of(lambda part: _shape(part)[0])),
    ("__hash__", _of(id)),
    ("__iter__", _of(lambda part: iter(torch.unbind(part)))),
    (
        "dim ndimension _has_compatible_shallow_copy_type is_floating_point is_complex is_inference element_size "
        "get_device is_contiguous new_zeros new_ones new_empty new_full new_tensor is_pinned untyped_storage "
        "requires_grad_ detach_",
        _plain,
    ),
    ("register_hook", _hooked),
    ("grad", _gradients),
    ("retain_grad register_post_accumulate_grad_hook data_ptr", _of_leaf),
    ("set_ resize_", _refused),
)
_BY_ATTRIBUTE = _by_name(
    ("shape", _of(_shape)),
    ("nbytes", _of(lambda part: _shape(part).numel() * part.element_size())),
    ("T mT H mH", _moved),
    ("data grad", _of_owner),
)
_EACH = _by_name(
    (
        "float double half bfloat16 to type_as cpu cuda contiguous detach zero fill copy zeros_like ones_like "
        "empty_like full_like hardswish logsigmoid softsign tanhshrink truediv rtruediv radd rmul rpow rdiv "
        "floor_divide floordiv mod and or xor invert bernoulli rrelu alpha_dropout",
        _each,
    )
)
"""Operations on each element, by their names without underscores, that torch does not mark as pointwise."""
_NOT_EACH = ("max", "min", "frexp")
_IN_PLACE = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__", "__ior__")
_DRAWING = ("bernoulli", "rrelu")
_PLACES = {"normalize": 2}
"""Of the argument ``dim``; 1 elsewhere."""


def rule_of(func: Any) -> Rule | None:
    """What computes an operation on parts; None if it always needs whole tensors."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        attribute = func.__self__.__name__
        return None if attribute in ("real", "imag") else _BY_ATTRIBUTE.get(attribute, _plain)
    if name == "__set__":
        return _assigned if func.__self__.__name__ in ("grad", "data") else _of_leaf
    if name.startswith("_foreach_"):
        return _list_in_place if name.endswith("_") and _is_pointwise(name[len("_foreach_") : -1]) else None
    bare = name.strip("_")
    names = (bare, bare[1:]) if name in _IN_PLACE else (bare,)
    is_each = any(each in _EACH or _is_pointwise(each) for each in names)
    return _BY_NAME.get(name, _each if is_each else None)


@cache
def _is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name in _NOT_EACH:
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())
