"""Placeholder tensors: they take no memory and stand for values that only other stages hold.

A placeholder has the shape, dtype and device of the real tensor and no values. Everything computed from a placeholder
is a placeholder too, and remembers its sources. So code that only passes values on keeps working, optimizers and
``state_dict`` see every parameter in its place, and a placeholder marks each result that needs the missing values.
``torch.equal`` compares placeholders by identity: a placeholder equals itself only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from lightning_multigpu.engine.errors import PipelineError

_OURS = ("sources", "fixed", "_is_param")


class Placeholder(Tensor):
    """A tensor without values.

    Args:
        like: gives the shape, dtype, strides and device.
        source: the name of the missing tensor, for messages: "parameter layers.3.weight".
        device: replaces the device of ``like``.
        fixed: a write raises an error; by default a write changes nothing.

    Attributes:
        sources: the sources of all placeholders that this one was computed from.
    """

    sources: tuple[str, ...]
    fixed: bool

    @staticmethod
    def __new__(
        cls, like: Tensor, source: str, device: torch.device | None = None, *, fixed: bool = False
    ) -> Placeholder:
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device or like.device
        )

    def __init__(self, like: Tensor, source: str, device: torch.device | None = None, *, fixed: bool = False) -> None:
        self.sources = (source,)
        self.fixed = fixed

    @property
    def source(self) -> str:
        """The first of the sources."""
        return self.sources[0]

    def resized(self, shape: Sequence[int]) -> Placeholder:
        """A placeholder for the same values in another shape."""
        return Placeholder(torch.empty(shape, dtype=self.dtype, device="meta"), self.source, self.device)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Placeholder({self.source}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise self._missing("numpy")

    def tolist(self) -> Any:
        raise self._missing("tolist")

    def _missing(self, operation: object) -> PipelineError:
        message = f"a step computes with {self.source}, whose values are on another rank ({operation})"
        return PipelineError(message, self.sources)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.equal.default:  # how Lightning looks for a parameter in an optimizer
            return args[0] is args[1]
        mine, *others = (t for t in tree_iter((args, kwargs)) if isinstance(t, Placeholder))
        sources = mine.sources
        if others:
            sources = tuple(dict.fromkeys((*sources, *(source for other in others for source in other.sources))))
        if func._schema.is_mutable:
            return _unchanged(func, args, mine, sources)
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else mine.device
        meta_args, meta_kwargs = tree_map_only(Tensor, _shape_only, (args, kwargs))
        if "device" in kwargs:
            meta_kwargs["device"] = torch.device("meta")
        try:
            results = func(*meta_args, **meta_kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise PipelineError(f"{mine._missing(func)}: {error}", sources) from error

        def placeholder(result: Tensor) -> Placeholder:
            made = Placeholder(result, mine.source, device)
            made.sources = sources
            return made

        return tree_map_only(Tensor, placeholder, results)


def exchange(old: Tensor, new: Tensor) -> None:
    """Gives ``old`` the contents of ``new``; ``old`` stays the same Python object and keeps its other attributes.

    Raises:
        RuntimeError: an autograd graph or a weak reference refers to one of them.
    """
    own = {name: value for name, value in vars(old).items() if name not in _OURS}
    torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
    vars(old).update(own)


def first_placeholder(values: Any) -> Placeholder | None:
    """The first placeholder within nested containers; None if there is none."""
    return next((value for value in tree_iter(values) if isinstance(value, Placeholder)), None)


def _shape_only(tensor: Tensor) -> Tensor:
    if isinstance(tensor, Placeholder):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return tensor.to("meta")


def _unchanged(func: Any, args: Any, mine: Placeholder, sources: tuple[str, ...]) -> Any:
    """Writing into a placeholder changes nothing; writing one into a real tensor would lose the tensor's values."""
    if args and isinstance(args[0], Placeholder):
        if args[0].fixed:
            raise PipelineError(f"{args[0].source} is changed in place, which would be lost between stages")
        args[0].sources = sources
        return args[0]
    message = f"{func} writes {mine.source}, whose values are on another rank, into a tensor of this one"
    raise PipelineError(message, sources)
