"""States of optimizers whose parameters are split: parts, which user code reads as the whole tensors."""

from __future__ import annotations

from collections.abc import MutableMapping
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
