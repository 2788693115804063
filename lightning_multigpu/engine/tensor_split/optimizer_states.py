"""States of optimizers whose parameters are split: parts, which user code reads as the whole tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor

from lightning_multigpu.engine.tensor_split.parts import SplitParameter, SplitTensor, local


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

    def __getitem__(self, name: str) -> Any:
        value = self.own[name]
        is_part = isinstance(value, Tensor) and value.dim() and value.shape == local(self._parameter).shape
        return SplitTensor.of(value, self._parameter.placed, is_held=True) if is_part else value

    def __setitem__(self, name: str, value: Any) -> None:
        self.own[name] = own_value(self._parameter, value)
        self._show(name)

    def _show(self, name: str) -> None:
        dict.__setitem__(self, name, self[name])  # type: ignore[index]

    def __delitem__(self, name: str) -> None:
        del self.own[name]
        dict.pop(self, name, None)  # type: ignore[call-overload]

    def __iter__(self) -> Iterator[str]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return {name: copy.deepcopy(self[name], memo) for name in self}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, ({name: self[name] for name in self},)
