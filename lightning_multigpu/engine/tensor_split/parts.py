"""Parts of tensors: each rank holds one, and to code it is the whole tensor.

What lies between a column layer and a row layer is a :class:`SplitTensor`, of the shape of the whole tensor. An
operation that is right on parts works on this rank's part; any other one gets the whole tensor, which all ranks gather
for it::

    hidden = up(x)                        (batch, tokens, hidden), of which a rank holds (batch, tokens, hidden / N)
    F.gelu(hidden) * scale                on parts: each element by itself
    hidden.view(b, t, heads, -1)          on parts: whole heads stay on a rank
    down(hidden)                          on parts: the row layer sums over the ranks
    F.normalize(hidden, dim=-1)           gathered; down() then takes this rank's part of the result

What code computes from a weight, a gradient or an optimizer's state is gathered, so that all code may keep it; their
views stay parts. A whole tensor that takes part in an operation on parts gets the sum of its gradients over the ranks.
Random numbers for a part differ between ranks. Operations in place change the parts, also those that are computed on a
gathered tensor; who changes a view of a gathered tensor, and then uses the part, gets an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_multigpu._torch_compat import ENTRANCES, is_transformed, update_together
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.replaced_attributes import replaced
from lightning_multigpu.engine.tensor_split.parameter_split import ParameterSplit, split_of
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup

Ranges = tuple[tuple[tuple[int, int], ...], ...]
"""Of each rank, the entries along a dimension that it has; see :class:`.ParameterSplit`."""


class PartLayout(NamedTuple):
    """Who holds which part of a tensor.

    Attributes:
        split: the dimension that is split, and the entries of each rank.
        layer: the name of the layer that has made the part, for the meter.
    """

    split: ParameterSplit
    group: TensorGroup
    layer: str

    def at(self, dim: int, ranges: Ranges | None = None) -> PartLayout:
        """The placement along another dimension."""
        return PartLayout(ParameterSplit(dim, ranges or self.split.ranges), self.group, self.layer)

    def own(self, whole: Tensor) -> Tensor:
        """A copy of this rank's part of a whole tensor."""
        return self.split.part(whole, self.group.rank)


class _View(NamedTuple):
    """A view of a gathered tensor that was given out by an operation."""

    operation: str
    counter: Tensor  # empty, with the version counter that the view and its own views count in
    version: int  # of the view when it was given out
    storage: StorageWeakRef  # of the gathered tensor, which lives as long as a view does

    def is_changed(self) -> bool:
        return bool(self.counter._version != self.version)


class SplitTensor(Tensor):
    """This rank's part of a tensor, which shows the shape of the whole; make it with :meth:`of`."""

    placed: PartLayout
    gathered_views: list[_View]
    """Of this part, and of others with the same memory."""
    is_held: bool
    """It is memory of a parameter, a gradient or a state: what is computed from it is gathered."""

    @classmethod
    def of(cls, local: Tensor, placed: PartLayout | None, *, is_held: bool = False) -> Any:
        """A part of this rank's values, or the values where there is no placement.

        A placeholder becomes one in the shape of the whole.
        """
        if placed is None:
            return local
        if isinstance(local, Placeholder):
            return local.resized(placed.split.whole_shape(local))
        if torch._C._are_functorch_transforms_active():
            _check_untransformed(placed.layer)
        part = local.as_subclass(cls)
        part.placed, part.gathered_views, part.is_held = placed, [], is_held
        return part

    def plain(self, operation: Any) -> Any:
        """An ordinary tensor, or parameter, of the whole values for an operation on it; a collective."""
        value = _Gathering(operation).whole(self).detach()
        if not isinstance(self, SplitParameter):
            return value.requires_grad_(self.requires_grad)
        found = Parameter(value, self.requires_grad)
        vars(found).update({name: each for name, each in vars(self).items() if name not in _OURS})
        return found

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self.plain(SplitTensor.__deepcopy__)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain(SplitTensor.__reduce_ex__).__reduce_ex__(protocol)

    def set_(self, *args: Any) -> Any:
        """As torch's own, the one method that torch does not pass on to ``__torch_function__``."""
        if torch._C._is_torch_function_enabled():
            return self.__torch_function__(Tensor.set_, (type(self),), (self, *args))
        return Tensor.set_(self, *args)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if SplitParameter in types and _shows_parts((*args, *kwargs.values())):
                return func(*args, **kwargs)
            rule = _rule_of(func)
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


update_together(SplitParameter)


_OURS = ("placed", "gathered_views", "is_held")


def cut(parameter: Parameter, placed: PartLayout) -> None:
    """Makes a whole parameter this rank's part of it, in place: optimizers and modules keep the object."""
    known = split_of(parameter)
    if known is None:
        parameter.data, parameter.grad = placed.own(parameter.data), None
        part: Any = parameter
        part.__class__ = SplitParameter
        part.placed, part.gathered_views, part.is_held = placed, [], True
    elif known != placed.split:
        raise ValueError("a parameter that two layers share cannot be cut in two ways")


def forget_split(parameter: Tensor) -> None:
    """The tensor, or the placeholder of one, is an ordinary one again."""
    if isinstance(parameter, SplitTensor):
        parameter.__class__ = Parameter if isinstance(parameter, SplitParameter) else Tensor  # type: ignore[assignment]
    for name in _OURS:
        vars(parameter).pop(name, None)


def make_whole(parameter: Tensor, value: Tensor) -> None:
    """Gives a tensor that may be split its whole value."""
    forget_split(parameter)
    parameter.data = value


@cache
def _rule_of(func: Any) -> Callable[[Any, Any, Any], Any] | None:
    from lightning_multigpu.engine.tensor_split.part_rules import rule_of  # it needs the types above

    return rule_of(func)


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
        return own_values(value) if isinstance(value, SplitTensor) else value


def whole(value: Any) -> Any:
    """The gathered tensor of a part, a collective; anything else as it is."""
    if not isinstance(value, SplitTensor):
        return value
    return _whole_of(local(value), value.placed)


def whole_values(value: Any, reader: str) -> Any:
    """A tree with gathered tensors for its parts, for who reads them; a collective of their tensor group."""
    if not any(isinstance(leaf, SplitTensor) for leaf in tree_leaves(value)):
        return value
    return tree_map_only(SplitTensor, lambda part: part.plain(reader), value)


def _whole_of(part: Tensor, placed: PartLayout) -> Tensor:
    """The whole tensor of which each rank has a part; in backward each rank takes its part of the gradient.

    One all-gather in forward, nothing in backward: all ranks have to compute the same with the whole tensor.
    """
    gathered: Tensor = _Gather.apply(part, placed, f"{placed.layer} gathered")  # type: ignore[no-untyped-call]
    return gathered.contiguous()


def own_of(tensor: Tensor, placed: PartLayout, name: str) -> Tensor:
    """This rank's part of a tensor that all ranks have; in backward the gradient is gathered."""
    return _Own.apply(tensor, placed, name)  # type: ignore[no-untyped-call, no-any-return]


def entered(tensor: Tensor, group: TensorGroup, name: str) -> Tensor:
    """The tensor itself; in backward its gradient is summed over the ranks."""
    return _Enter.apply(tensor, group, name)  # type: ignore[no-untyped-call, no-any-return]


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, placed: PartLayout, name: str) -> Tensor:
        ctx.placed = placed
        return placed.split.gather(part.detach(), placed.group, name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.placed.own(gradient), None, None


class _Own(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, placed: PartLayout, name: str) -> Tensor:
        ctx.placed, ctx.layer_name = placed, name
        return placed.own(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.placed.split.gather(gradient, ctx.placed.group, ctx.layer_name).contiguous(), None, None


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, name: str) -> Tensor:
        ctx.group, ctx.layer_name = group, name
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.group.all_reduce(gradient.clone(memory_format=torch.contiguous_format), ctx.layer_name), None, None


@contextmanager
def functions_get_whole() -> Iterator[None]:
    """Within the block all users' ``autograd.Function`` get whole tensors for parts, as any unknown operation.

    torch calls their forward with parts and their backward with plain gradients of parts, which would not fit together.
    A transform of torch.func, which would take a part for the whole tensor, is refused.
    """
    known = vars(Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        plain = known.__get__(None, cls)  # a classmethod, and from torch 2.14 on a descriptor of C
        if cls.__module__.startswith("lightning_multigpu."):
            _check_untransformed("a layer", args)
        elif any(isinstance(a, SplitTensor) for a in args):
            gathering = _Gathering(cls)
            return gathering.end(plain(*gathering.whole(args), **kwargs))
        return plain(*args, **kwargs)

    def enter(plain: Callable[..., Tensor], tensor: Tensor, *args: Any) -> Tensor:
        if isinstance(tensor, SplitTensor):
            _check_untransformed(tensor.placed.layer)
        return plain(tensor, *args)

    with ExitStack() as undo:
        Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
        undo.callback(setattr, Function, "apply", known)
        for module, name in ENTRANCES:
            undo.enter_context(replaced(module, **{name: partial(enter, getattr(module, name))}))
        yield


def _check_untransformed(layer: str, values: Iterable[Any] = ()) -> None:
    if is_transformed(values):
        raise RuntimeError(
            "a transform of torch.func (vmap, grad, jvp, ...) or a forward-mode derivative cannot follow what ranks "
            f"send each other in {layer}, which is split: keep it whole (plan={{...}}), take "
            f"trainer.strategy.whole(tensor) before the transform, or use strategy='ring_ddp' ({user_line()})"
        )


def user_line() -> str:
    """The file and line of the user's code that is running."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_USERS:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_NOT_USERS = ("torch", "lightning_multigpu", "lightning", "pytorch_lightning", "contextlib", "functools")


# Operations on whole tensors


def own_values(part: Tensor, *, changes: str = "") -> Tensor:
    """This rank's values; ``changes`` names the operation that is about to change them.

    Raises:
        RuntimeError: a view of a gathered tensor was changed, or would have to change with the part.
    """
    for view in part.gathered_views:  # type: ignore[attr-defined]
        if view.is_changed() or (changes and not view.storage.expired()):
            raise RuntimeError(
                f"{changes or view.operation} in place: the output of {part.placed.layer} is split over the ranks, and "  # type: ignore[attr-defined]
                f"the result of {view.operation} is a view of a gathered copy, which does not change with it. Change "
                f"the tensor itself before {view.operation}, as in hidden[..., 0] = value, or use an operation that "
                "returns a new tensor, such as masked_fill"
            )
    return part.as_subclass(Tensor)


def part_like(result: Tensor, part: Any, func: Any, placed: PartLayout | None = None) -> Tensor:
    """The result of a function of a part; gathered if it is a new value of what a rank holds."""
    like: SplitTensor = SplitTensor.of(result, placed or part.placed, is_held=part.is_held)
    if part.gathered_views or part.is_held:
        if _have_one_storage(result, part):
            like.gathered_views = part.gathered_views
        elif part.is_held:
            return _Gathering(func).whole(like)  # type: ignore[no-any-return]
    return like


def _have_one_storage(first: Tensor, second: Tensor) -> bool:
    return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)


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
        return tree_map_only(SplitTensor, self._whole, value)

    def _whole(self, part: SplitTensor) -> Tensor:
        _, group, layer = part.placed
        _check_untransformed(layer)
        group.on_gather(layer, self._operation)
        group.agree_on_read(f"{self._operation} of values of {layer} ({user_line()})")
        with _counting_versions():
            gathered = _whole_of(own_values(part), part.placed)
        self._gathered.append((part, gathered, gathered._version))
        return gathered

    def end(self, result: Any) -> Any:
        """The operation's result; parts that it has changed in place get the new values."""
        for part, gathered, version in self._gathered:
            if gathered._version != version:
                own = own_of(gathered, part.placed, f"{part.placed.layer} {self._operation}")
                own_values(part, changes=self._operation).copy_(own)
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


# States of optimizers whose parameters are split: parts, which user code reads as the whole tensors


def state_of(parameter: Tensor, state: Any) -> Any:
    """A parameter's state for user code."""
    if not isinstance(parameter, SplitParameter) or not isinstance(state, MutableMapping):
        return state
    return _StateOfParts(state, parameter)


def own_state(parameter: Tensor, state: Any) -> Any:
    """What an optimizer keeps of a parameter's state, in which tensors are whole, or parts."""
    if isinstance(state, _StateOfParts):
        return state.own
    if isinstance(state, MutableMapping):
        state.update({name: own_value(parameter, value) for name, value in state.items()})
    return state


def own_value(parameter: Tensor, value: Any) -> Any:
    """What an optimizer keeps of a value of a parameter's state."""
    value = local(value)
    if not isinstance(parameter, SplitParameter) or not isinstance(value, Tensor):
        return value
    is_whole = [*value.shape] == parameter.placed.split.whole_shape(local(parameter))
    return parameter.placed.own(value) if is_whole else value


class _StateOfParts(MutableMapping[str, Any], dict[str, Any]):  # type: ignore[misc, metaclass]  # torch loads dicts
    """A parameter's state, in which user code finds parts; so does code that reads the dict's own storage."""

    def __init__(self, state: Any, parameter: SplitParameter) -> None:
        self.own, self._parameter = state, parameter
        for name in state:
            self._show(name)

    def _show(self, name: str) -> None:
        value, parameter = self.own[name], self._parameter
        is_part = isinstance(value, Tensor) and value.dim() and value.shape == local(parameter).shape
        shown = SplitTensor.of(value, parameter.placed, is_held=True) if is_part else value
        dict.__setitem__(self, name, shown)  # type: ignore[index]

    def __setitem__(self, name: str, value: Any) -> None:
        self.own[name] = own_value(self._parameter, value)
        self._show(name)

    def __delitem__(self, name: str) -> None:
        del self.own[name]
        dict.__delitem__(self, name)  # type: ignore[arg-type]

    __getitem__, __iter__, __len__ = dict.__getitem__, dict.__iter__, dict.__len__

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)
