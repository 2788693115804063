"""Puts a module back as it was, after a forward pass that is to leave no trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_multigpu.engine.pipeline.splitting.placeholder import Placeholder


@contextmanager
def preserved_state(module: Module) -> Iterator[None]:
    """Restores at the end of the block what a forward pass may change in a module and its children.

    Those are buffers, attributes (states of torchmetrics among them), the contents of lists, dictionaries, sets and
    deques in attributes, generators of random numbers, and whether modules are in training mode. Values of parameters,
    and what other objects hold, are left alone.
    """
    undo: list[Callable[[], None]] = []
    seen: set[int] = set()
    for part in module.modules():
        _keep(vars(part), undo, seen)
    try:
        yield
    finally:
        with torch.no_grad():
            for step in undo:
                step()


def _keep(value: Any, undo: list[Callable[[], None]], seen: set[int]) -> None:
    """Adds to ``undo`` what puts ``value`` back in place, and all that it contains."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        _keep_tensor(value, undo)
    elif isinstance(value, torch.Generator):
        state = value.get_state()
        undo.append(lambda: _discard(value.set_state(state)))
    elif isinstance(value, dict):
        _keep_dict(value, undo)
        for entry in list(value.values()):
            _keep(entry, undo, seen)
    elif isinstance(value, list | deque):
        _keep_container(value, list(value), value.extend, undo)
        for entry in list(value):
            _keep(entry, undo, seen)
    elif isinstance(value, set):
        _keep_container(value, set(value), value.update, undo)
    elif isinstance(value, tuple):
        for entry in value:
            _keep(entry, undo, seen)


def _keep_tensor(tensor: Tensor, undo: list[Callable[[], None]]) -> None:
    # Tensors made in inference mode cannot be changed outside of it.
    if isinstance(tensor, Parameter | Placeholder) or tensor.is_inference():
        return
    before = tensor.detach().clone()

    def restore() -> None:
        if tensor.shape == before.shape:
            tensor.copy_(before)
        else:
            tensor.data = before

    undo.append(restore)


def _keep_dict(table: dict[Any, Any], undo: list[Callable[[], None]]) -> None:
    before = dict(table)

    def restore() -> None:
        dict.update(table, before)  # at no time is an attribute missing: other threads may look at it
        for name in [name for name in table if name not in before]:
            del table[name]

    undo.append(restore)


def _keep_container(container: Any, before: Any, fill: Callable[[Any], Any], undo: list[Callable[[], None]]) -> None:
    def restore() -> None:
        container.clear()
        fill(before)

    undo.append(restore)


def _discard(_: Any) -> None:
    """Makes a call of any type one that returns nothing."""
