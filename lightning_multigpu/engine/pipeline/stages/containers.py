"""Tensors in nested containers, found and exchanged between the calls of layers.

What ``torch.utils._pytree`` does, but quickly for what layers mostly take and give: tensors, tuples, lists and
dictionaries. Every layer of every micro-batch is called through here, with caches that the layer before has emptied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

T = TypeVar("T")

_PLAIN = (type(None), bool, int, float, str)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors within nested containers, in order."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def map_only(kind: type[T], function: Callable[[T], Any], value: Any) -> Any:
    """Nested containers with every object of ``kind`` replaced by what ``function`` returns for it."""
    if isinstance(value, kind):
        return function(value)
    exact = type(value)
    if exact is tuple or exact is list:
        return exact([map_only(kind, function, entry) for entry in value])
    if exact is dict:
        return {key: map_only(kind, function, entry) for key, entry in value.items()}
    if exact in _PLAIN or isinstance(value, Tensor):
        return value
    return tree_map_only(kind, function, value)


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
        return
    exact = type(value)
    if exact is tuple or exact is list:
        for entry in value:
            _collect(entry, found)
    elif exact is dict:
        for entry in value.values():
            _collect(entry, found)
    elif exact not in _PLAIN:
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
