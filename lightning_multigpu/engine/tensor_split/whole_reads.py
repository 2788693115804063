"""Parameters and gradients of split layers that user code reads as if they were whole.

Within :class:`WholeReads` operations on them give what they give on one device::

    p.grad.clamp_(-1, 1), p.grad * 2    each element by itself: on this rank's part
    p.grad.norm(), p.grad.T, p.shape    anything else: on the gathered tensor, by all ranks
    p.grad[0] = 0, p.grad.normal_()     also in place: each rank then takes its part of the gathered tensor
    p.grad = torch.ones(p.shape)        this rank's part is assigned
    p.dtype, p.device, p.requires_grad  those of the part, without the other ranks

A placeholder, of which only another stage of a pipeline has a part, has the whole shape too; nothing is gathered.

Within :class:`StepReads` so do parameters that a step's own code gets from a split layer. Before it gets one, nothing
is intercepted: the layers compute with their parts, and a step that reads no parameter costs what it did.

States of optimizers are parts, too: :class:`StateReads` raises where a value of them would be that of a part.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.tensor_split.parameter_split import ParameterSplit, mark, split_of
from lightning_multigpu.engine.tensor_split.parts import whole_of
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup

_SIZES = frozenset({"shape", "size", "numel", "nelement", "nbytes", "__len__"})
_OF_A_PART = frozenset(
    {"dim", "ndimension", "is_floating_point", "is_complex", "is_contiguous", "is_inference", "element_size"}
    | {"get_device", "data_ptr"}
    | {"requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
)
"""What is the same for a part and for the whole tensor, or belongs to the part."""

_EACH = frozenset(
    {"add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "truediv", "rtruediv", "itruediv"}
    | {"neg", "abs", "sign", "pow", "square", "sqrt", "clamp", "eq", "ne", "lt", "le", "gt", "ge"}
    | {"isnan", "isinf", "isfinite", "nan_to_num", "masked_fill", "zero", "fill", "copy", "zeros_like", "ones_like"}
    | {"clone", "detach", "to", "float", "double", "half", "bfloat16", "cpu", "cuda"}
)
"""Operations on each element by itself, by their names without underscores. Others are right, too, and slower."""

_LISTS = "foreach_"

_Part = tuple[Tensor, ParameterSplit]


class WholeReads(TorchFunctionMode):
    """Within the block parameters of split layers, and their gradients, read as whole ones.

    Args:
        group: the ranks that hold parts; all of them have to read the same.

    Raises:
        RuntimeError: at the end of the block, if a view of a gathered tensor was changed, which changes no rank's part.
    """

    def __init__(self, group: TensorGroup) -> None:
        super().__init__()
        self._group = group
        self._parts: Any = WeakIdKeyDictionary()
        self._gathered: list[tuple[str, Tensor, int]] = []

    @override
    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self._check_views(error)

    def _check_views(self, error: BaseException | None) -> None:
        changed = [name for name, counter, version in self._gathered if counter._version != version]
        self._gathered = []
        if changed and error is None:
            raise RuntimeError(
                f"a view that {changed[0]} has given of a split layer's parameter or gradient was changed, and each "
                "rank has a part of it, which does not change: assign to the tensor itself, as in p.grad[0] = value"
            )

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        states = {id(each): plain(each) for each in _tensors((args, kwargs or {})) if type(each) is StatePart}
        if states:
            args, kwargs = _replaced(args, states), _replaced(kwargs, states)
        return self.read(func, args, kwargs or {})

    def read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of an operation, on whole tensors if it has parts among its arguments."""
        found = [(each, split) for each in _tensors((args, kwargs)) if (split := self._split_of(each)) is not None]
        if not found:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name == "__set__":
            return func(args[0], self._part_of(args[1], found[0][1]))
        if is_attribute := name == "__get__":
            name = func.__self__.__name__
        if name in _SIZES:
            part, split = found[0]
            whole = torch.empty(split.whole_shape(part), dtype=part.dtype, device="meta")
            return func(whole, *args[1:], **kwargs)
        return self._of_values(func, name, is_attribute, found, args, kwargs)

    def _of_values(self, func: Any, name: str, is_attribute: bool, found: list[_Part], args: Any, kwargs: Any) -> Any:
        """Returns the result of an operation on values."""
        if name in ("grad", "data") or name in _OF_A_PART or self._is_of_each(name, args, kwargs):
            return self._of_parts(func(*args, **kwargs), args, found[0][1])
        if is_attribute and not isinstance(value := func(*args, **kwargs), Tensor):
            return value  # dtype, device, requires_grad, ...
        return self._on_whole(func, name, found, args, kwargs)

    def _is_of_each(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether an operation does with parts what it does with the whole tensors."""
        name = name.strip("_")
        if name.removeprefix(_LISTS) not in _EACH:
            return False
        if name.startswith(_LISTS):  # its first argument is a list of tensors, each by itself
            return all(each.dim() == 0 for each in _tensors((args[1:], kwargs)))
        tensors = [each for each in _tensors((args, kwargs)) if each.dim()]
        first = tensors[0]
        return all(
            self._split_of(each) == self._split_of(first) is not None and each.shape == first.shape for each in tensors
        )

    def _of_parts(self, result: Any, args: Any, split: ParameterSplit) -> Any:
        """Notes that results of an operation on parts are parts."""
        if isinstance(result, Tensor):
            self._parts[result] = split
        elif isinstance(result, list | tuple):
            for part, each in zip(_tensors(args[0]), _tensors(result), strict=True):
                self._parts[each] = self._split_of(part)
        return result

    def _part_of(self, value: Any, split: ParameterSplit) -> Any:
        """What is assigned to an attribute: this rank's part of a whole tensor."""
        if not isinstance(value, Tensor) or self._split_of(value) is not None:
            return value
        return split.part(value, self._group.rank)

    def _split_of(self, tensor: Tensor) -> ParameterSplit | None:
        return split_of(tensor) or self._parts.get(tensor)

    def _whole(self, part: Tensor, split: ParameterSplit, name: str) -> Tensor:
        if isinstance(part, Placeholder):
            return part.resized(split.whole_shape(part))
        return split.gather(part.detach(), self._group, name)

    def _on_whole(self, func: Any, name: str, found: list[_Part], args: Any, kwargs: Any) -> Any:
        whole = {id(part): self._whole(part, split, f"{name} of a whole tensor") for part, split in found}
        versions = {key: tensor._version for key, tensor in whole.items()}
        result = func(*_replaced(args, whole), **_replaced(kwargs, whole))
        for part, split in found:
            gathered = whole[id(part)]
            if gathered._version != versions[id(part)]:
                part.copy_(split.part(gathered, self._group.rank))
            if isinstance(part, Placeholder):
                continue
            counter = gathered.detach()
            counter.data = torch.empty(0)  # keeps the counter, and not the memory
            self._gathered.append((name, counter, gathered._version))
        return result


class StepReads(WholeReads):
    """Parameters that a step's own code gets from split layers read as whole ones; all ranks have to read the same.

    Every operation on them gets the gathered tensor, also those on each element by itself, so that their results are
    whole. Gradients flow back to each rank's part.

    Args:
        group: the ranks that hold parts.
    """

    def __init__(self, group: TensorGroup) -> None:
        super().__init__(group)
        self._read: list[Parameter] = []

    @contextmanager
    def during_step(self) -> Iterator[None]:
        """Within the block, a step, split layers tell which parameters they have given to other code.

        Raises:
            RuntimeError: as of :class:`WholeReads`.
        """
        self._group.reads, error = self, None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._group.reads = None
            for parameter in self._read:
                parameter.__class__ = Parameter
            self._read = []
            self._check_views(error)

    def give(self, parameter: Parameter | None) -> None:
        """A split layer's parameter has been given to other code than the layer."""
        if type(parameter) is Parameter and split_of(parameter) is not None:
            parameter.__class__ = ReadParameter
            parameter._reads = self  # type: ignore[attr-defined]
            self._read.append(parameter)

    @override
    def _of_values(self, func: Any, name: str, is_attribute: bool, found: list[_Part], args: Any, kwargs: Any) -> Any:
        if name in ("grad", "data", "detach"):
            part = func(*args, **kwargs)
            return None if part is None else _PartInStep.of(part, found[0][1], self)
        if name in _OF_A_PART or (is_attribute and not isinstance(func(*args, **kwargs), Tensor)):
            return func(*args, **kwargs)
        if self._group.reads is not self:
            raise RuntimeError(
                f"{name} after the step, on what the step has kept of a split layer's parameter: each rank has a part; "
                "use trainer.strategy.whole(parameter) on all ranks"
            )
        return self._on_whole(func, name, found, args, kwargs)

    @override
    def _whole(self, part: Tensor, split: ParameterSplit, name: str) -> Tensor:
        return whole_of(part, split, self._group, name)


class ReadParameter(Parameter):
    """A split layer's parameter that other code has got in a step; see :class:`StepReads`."""

    _reads: StepReads

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads = next(each._reads for each in _tensors((args, kwargs)) if isinstance(each, ReadParameter | _PartInStep))
        with torch._C.DisableTorchFunctionSubclass():
            return reads.read(func, args, kwargs)


class _PartInStep(Tensor):
    """A tensor that shares memory with a :class:`ReadParameter`, or its gradient."""

    _reads: WholeReads
    __torch_function__ = ReadParameter.__torch_function__

    @classmethod
    def of(cls, part: Tensor, split: ParameterSplit, reads: WholeReads) -> _PartInStep:
        alias = part.as_subclass(cls)
        mark(alias, split)
        alias._reads = reads
        return alias


class StatePart(_PartInStep):
    """This rank's part of a tensor of an optimizer's state, for user code; it shares the part's memory."""

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()


class StateReads(WholeReads):
    """States of optimizers that user code reads: operations on each element work on the part, and others raise.

    Attributes:
        is_updating: the optimizer's own step reads the states.
    """

    is_updating = False

    def state_of(self, parameter: Tensor, state: Any) -> Any:
        """A parameter's state for who reads it now."""
        split = split_of(parameter)
        if split is None or self.is_updating or not isinstance(state, MutableMapping):
            return state
        return _StateOfParts(state, parameter, split, self)

    def own_state(self, parameter: Tensor, state: Any) -> Any:
        """What an optimizer keeps of a parameter's state, in which tensors are whole, or parts."""
        if isinstance(state, _StateOfParts):
            return state.own
        if isinstance(state, MutableMapping):
            state.update({name: self.own_value(parameter, value) for name, value in state.items()})
        return state

    def own_value(self, parameter: Tensor, value: Any) -> Any:
        """What an optimizer keeps of a value of a parameter's state."""
        split, value = split_of(parameter), plain(value)
        if split is None or not isinstance(value, Tensor):
            return value
        with torch._C.DisableTorchFunction():
            is_whole = [*value.shape] == split.whole_shape(parameter)
            return value if not is_whole else split.part(value, self._group.rank)

    @override
    def _of_parts(self, result: Any, args: Any, split: ParameterSplit) -> Any:
        if isinstance(result, list | tuple):
            return type(result)(self._of_parts(each, args, split) for each in result)
        is_new = isinstance(result, Tensor) and not isinstance(result, _PartInStep | Parameter)
        return StatePart.of(result, split, self) if is_new else result

    @override
    def _on_whole(self, func: Any, name: str, found: list[_Part], args: Any, kwargs: Any) -> Any:
        self.refuse(name.strip("_"))

    def refuse(self, operation: str) -> NoReturn:
        """Raises RuntimeError: an operation needs the whole tensor."""
        raise RuntimeError(
            f"{operation} of a tensor in optimizer.state, or in optimizer.state_dict(): its layer is split, and "
            "each rank has a part of the tensor. Read it in on_before_optimizer_step, where it is whole, or use "
            "trainer.strategy.whole(parameter, tensor) on all ranks; a checkpoint has whole states"
        )


class _StateOfParts(MutableMapping[str, Any], dict[str, Any]):  # type: ignore[misc, metaclass]  # torch loads dicts
    """A parameter's state, in which user code finds parts."""

    def __init__(self, state: Any, parameter: Tensor, split: ParameterSplit, reads: StateReads) -> None:
        self.own, self._parameter, self._split, self._reads = state, parameter, split, reads

    def __getitem__(self, name: str) -> Any:
        value = self.own[name]
        with torch._C.DisableTorchFunction():  # which would show whole shapes
            is_part = isinstance(value, Tensor) and value.dim() and value.shape == self._parameter.shape
            return StatePart.of(value, self._split, self._reads) if is_part else value

    def __setitem__(self, name: str, value: Any) -> None:
        self.own[name] = self._reads.own_value(self._parameter, value)

    def __delitem__(self, name: str) -> None:
        del self.own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return {name: copy.deepcopy(self[name], memo) for name in self}

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._reads.refuse("a copy")


def plain(tensor: Any) -> Any:
    """A split layer's parameter, or a state of it, for code that computes with this rank's part."""
    if type(tensor) not in (ReadParameter, StatePart):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        part: Tensor = tensor.as_subclass(Tensor)
    if type(tensor) is StatePart and (split := split_of(tensor)) is not None:
        mark(part, split)
    return part


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _replaced(value: Any, by_id: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return by_id.get(id(value), value)
    if isinstance(value, list | tuple):
        return type(value)(_replaced(each, by_id) for each in value)
    if isinstance(value, dict):
        return {key: _replaced(each, by_id) for key, each in value.items()}
    return value
