"""What a module's own code changes in a step, put back afterwards."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_multigpu.engine.pipeline.stand_in import StandIn


@contextmanager
def kept_state(module: Module) -> Iterator[None]:
    """Restores at the end of the block the buffers and attributes of a module and of all its parts.

    Tensors get their values back, and lists, dictionaries, sets and deques, however nested, their entries, all within
    the objects that they are. Parameters are left alone, and so is what is inside of any other object.
    """
    undo: list[Callable[[], None]] = []
    seen: set[int] = set()
    for part in module.modules():
        _remember(part.__dict__, undo, seen)
    try:
        yield
    finally:
        for restore in undo:
            restore()


def _remember(value: Any, undo: list[Callable[[], None]], seen: set[int]) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if not isinstance(value, Parameter | StandIn) and not value.is_inference():
            undo.append(functools.partial(_restore_tensor, value, value.detach().clone()))
        return
    if not isinstance(value, list | dict | set | deque):
        return
    undo.append(functools.partial(_restore_entries, value, list(value.items() if isinstance(value, dict) else value)))
    for entry in list(value.values() if isinstance(value, dict) else value):
        _remember(entry, undo, seen)


def _restore_tensor(tensor: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        if tensor.shape == values.shape:
            tensor.data.copy_(values)
        else:
            tensor.data = values


def _restore_entries(container: Any, entries: list[Any]) -> None:
    now = list(container.items() if isinstance(container, dict) else container)
    if len(now) == len(entries) and all(map(_same_entry, now, entries)):
        return
    container.clear()
    if isinstance(container, dict):
        for key, value in entries:
            container[key] = value
    elif isinstance(container, set):
        container.update(entries)
    else:
        container.extend(entries)


def _same_entry(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) == 2:
        return a[0] is b[0] and a[1] is b[1]
    return a is b
