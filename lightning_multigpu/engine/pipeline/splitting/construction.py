"""Construction: builds on each rank of a pipeline only the tensors that it will hold, with the values of one device.

The module is built twice. Both times modules register the same tensors in the same order, which matches them::

    dry run      every parameter becomes a placeholder as soon as it is registered: shows the tensors of the module, and
                 so where the module will be split
    building     tensors that this rank will hold stay; all others become placeholders. Random numbers that would fill
                 a placeholder are drawn into memory that is freed at once

No random number is left out, so the values equal those of one device. A rank never uses more memory than for the
tensors that it will hold and for the one tensor that is being filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter, init
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.placeholder import Placeholder, exchange, first_placeholder
from lightning_multigpu.engine.replaced_attributes import replaced

_Registered = Callable[[Module, str, Tensor | None], None]


class Construction:
    """Matches the tensors of a module between its dry run and its building."""

    def __init__(self) -> None:
        self._expected: list[tuple[str, Tensor]] = []

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """Drops the values of parameters that modules register within the block; draws no random numbers for them."""

        def registered(module: Module, name: str, tensor: Tensor | None) -> None:
            if tensor is not None:
                self._expected.append((_description(module, name, tensor), tensor))
                if isinstance(tensor, Parameter):
                    _drop(tensor, name, module)

        with _following(registered, draw=False):
            yield

    @contextmanager
    def building(self, is_held: Callable[[Tensor], bool]) -> Iterator[None]:
        """Keeps the values of tensors that modules register within the block if the one of the dry run ``is_held``.

        Raises:
            PipelineError: modules register other tensors than in the dry run.
        """
        expected = [(description, is_held(tensor)) for description, tensor in self._expected]
        self._expected = []
        number = 0

        def registered(module: Module, name: str, tensor: Tensor | None) -> None:
            nonlocal number
            if tensor is None:
                return
            found = _description(module, name, tensor)
            before, held = expected[number] if number < len(expected) else ("nothing", False)
            if found != before:
                raise PipelineError(f"it makes {found} where it made {before} when it was called first")
            number += 1
            if not held:
                _drop(tensor, name, module)

        with _following(registered, draw=True):
            yield
        if number < len(expected):
            raise PipelineError(f"it does not make {expected[number][0]} as it did when it was called first")


@contextmanager
def _following(registered: _Registered, *, draw: bool) -> Iterator[None]:
    """Calls ``registered`` with every tensor that becomes a parameter or buffer of a module within the block."""
    hooks = [
        register_module_parameter_registration_hook(registered),
        register_module_buffer_registration_hook(registered),
    ]
    truncated = init._no_grad_trunc_normal_

    def fill_truncated(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # The count of its random numbers depends on the drawn values, which a placeholder lacks.
        if not isinstance(tensor, Placeholder):
            return truncated(tensor, *args, **kwargs)
        if draw:
            truncated(_with_memory(tensor), *args, **kwargs)
        return tensor

    try:
        with _Draws(draw), replaced(init, _no_grad_trunc_normal_=fill_truncated):
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws the random numbers that would fill placeholders."""

    def __init__(self, draw: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw = draw

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if self._draw and is_random and first_placeholder((args, kwargs)) is not None:
            real_args, real_kwargs = tree_map_only(Placeholder, _with_memory, (args, kwargs))
            func(*real_args, **real_kwargs)
        return func(*args, **kwargs)


def _with_memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _drop(tensor: Tensor, name: str, module: Module) -> None:
    if isinstance(tensor, Placeholder) or is_lazy(tensor):
        return
    is_parameter = isinstance(tensor, Parameter)
    source = f"{'parameter' if is_parameter else 'buffer'} {name} of a {type(module).__name__}"
    new: Tensor = Placeholder(tensor.data, source)
    if is_parameter:
        new = Parameter(new, requires_grad=tensor.requires_grad)
    with suppress(RuntimeError):  # something refers to it; drop() replaces it when the module is complete
        exchange(tensor, new)


def _description(module: Module, name: str, tensor: Tensor) -> str:
    return f"{type(module).__name__}.{name} of shape {tuple(tensor.shape)}"
