"""Inputs of an attention whose shape gives the size of a rank's heads, in place of all heads.

The code of many attentions takes the size of all heads from the shape of the input, which is as wide::

    B, T, C = x.shape                                       # C is smaller, as self.n_head is
    q, k, v = self.qkv(x).split(C, dim=2)                   # the layer computes with the whole input
    q = q.view(B, T, self.n_head, C // self.n_head)         # the size of a head is right
    y = y.reshape(B, T, C)                                  # so is that of this rank's heads

Operations on such an input compute with the whole one, and give plain tensors; a norm of it reads as it does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.hooks import RemovableHandle

_KEEP_SHAPE = ("layer_norm", "rms_norm", "dropout")


class NarrowInput(Tensor):
    """A tensor whose last dimension reads as ``width``."""

    whole: Tensor
    width: int

    @classmethod
    def of(cls, whole: Tensor, width: int) -> NarrowInput:
        """The tensor, with a smaller last dimension in its shape."""
        narrow = whole.as_subclass(cls)
        narrow.whole, narrow.width = whole, width
        return narrow

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*tree_map(wide, args), **tree_map(wide, kwargs))
        first = args[0] if args else None
        if type(first) is not cls:
            return result
        if func == Tensor.shape.__get__ or (func is Tensor.size and isinstance(result, torch.Size)):  # type: ignore[attr-defined]
            return torch.Size([*result[:-1], first.width])
        if func is Tensor.size and next(iter((*args[1:], *kwargs.values()))) in (-1, first.dim() - 1):
            return first.width
        return cls.of(result, first.width) if func.__name__ in _KEEP_SHAPE else result


def wide(value: Any) -> Any:
    """The whole tensor of a :class:`NarrowInput`; anything else as it is."""
    return value.__dict__["whole"] if type(value) is NarrowInput else value


def narrow_inputs(module: Module, size: int, width: int) -> list[RemovableHandle]:
    """Makes the inputs of a module that are ``size`` wide read as ``width`` wide, and its outputs not.

    Args:
        module: an attention; its own layers compute with whole inputs.
        size: of the last dimension of the inputs.
        width: in their shape from now on, until the hooks that are returned are removed.
    """

    def narrow(value: Tensor) -> Tensor:
        if type(value) is not Tensor or value.dim() < 2 or value.shape[-1] != size or not value.is_floating_point():
            return value  # or a placeholder, on another stage of a pipeline
        return NarrowInput.of(value, width)

    def before(_: Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(Tensor, narrow, (args, kwargs))

    def after(_: Module, args: Any, output: Any) -> Any:
        return tree_map(wide, output)

    return [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
