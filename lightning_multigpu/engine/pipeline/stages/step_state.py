"""One random state for each part of each micro-batch, the same on all stages whatever the split.

What runs before the split part runs on every stage: were its random numbers drawn from each rank's own state, stages
would train on different noise. So the state is set, from a seed that all stages share, before a micro-batch begins,
before each layer, and behind the last layer.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_multigpu.engine.pipeline.splitting.placeholder import Placeholder


def seed_of(*parts: int) -> int:
    """A seed of 63 bits that depends on all parts and their order."""
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def set_random_state(seed: int, device: torch.device) -> None:
    """Seeds Python's random numbers, torch's on the CPU and, where ``device`` is a GPU, those there."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Restores the random states at the end of the block: what a pipeline draws is none of the caller's business."""
    python_state = random.getstate()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python_state)


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
