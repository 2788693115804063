"""Reads of split parameters by a step's own code, which would see a rank's part: they raise an error.

During a step split parameters have a class whose operations raise. Split layers take values within :func:`unguarded`,
so that a step without such reads costs what it did::

    self.up(x)                         the split layer computes with its part
    self.up.weight.norm()              raises
    self.up.weight.shape               allowed if the trial on the first batch has read it and computed the same
    self.up.weight.device              allowed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Parameter
from torch.utils._pytree import tree_iter

unguarded = torch._C.DisableTorchFunctionSubclass
"""Within the block operations on split parameters are those on a rank's part."""

_ALLOWED = {"device", "dtype", "requires_grad", "is_leaf", "layout", "ndim", "dim", "is_cuda", "is_cpu", "grad_fn"}
_ALLOWED |= {"is_meta", "is_sparse", "is_quantized", "is_floating_point", "is_complex", "get_device", "__hash__"}
_SIZES = {"shape", "size", "numel", "nelement", "nbytes", "__len__"}


class GuardedReads:
    """Raises an error where a step's own code reads split parameters."""

    def __init__(self) -> None:
        self._tried: set[tuple[str, str]] = set()
        self._is_trial = False

    @contextmanager
    def during(self, parameters: Iterable[tuple[str, Parameter]], *, is_trial: bool = False) -> Iterator[None]:
        """Within the block reads of the parameters are guarded.

        Args:
            parameters: split ones, with their names.
            is_trial: the results of the block are compared; sizes that it reads may be read in later blocks.

        Raises:
            RuntimeError: within the block, where values are read, or sizes that no trial has read.
        """
        guarded = [(name, each) for name, each in parameters if type(each) is Parameter]
        self._is_trial = is_trial
        for name, parameter in guarded:
            parameter._guard = self, name  # type: ignore[attr-defined]
            parameter.__class__ = _Guarded
        try:
            yield
        finally:
            for _, parameter in guarded:
                parameter.__class__ = Parameter
                del parameter._guard  # type: ignore[attr-defined]

    def check(self, operation: str, name: str) -> None:
        """Raises an error if the operation on the parameter of this name would see a part."""
        if operation in _SIZES and (self._is_trial or (operation, name) in self._tried):
            self._tried.add((operation, name))
            return
        raise RuntimeError(
            f"training_step reads {name} by {operation} outside of its layer, and each rank has a part of it: read it "
            "in on_before_optimizer_step, which sees whole weights; or read it in the first batch too (multiplied by "
            "0, for example): plan='auto' then leaves its layer whole"
        )


class _Guarded(Parameter):
    _guard: tuple[GuardedReads, str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        if operation not in _ALLOWED:
            guard, name = next(each._guard for each in tree_iter((args, kwargs)) if type(each) is _Guarded)
            guard.check(operation, name)
        with unguarded():
            return func(*args, **(kwargs or {}))
