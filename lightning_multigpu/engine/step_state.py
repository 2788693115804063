"""State of a step: random states set from seeds, and random and module states restored afterwards.

The part of a step before the layers runs on every stage. With each rank's own random numbers, stages would train on
different noise. So the random state is set from a seed that all stages share, before a micro-batch begins, before each
layer, and after the last layer, and random numbers do not depend on the split.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.data import Dataset

from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.placeholder import Placeholder, first_placeholder
from lightning_multigpu.engine.replaced_attributes import replaced


def seed_of(*parts: int) -> int:
    """A seed of 63 bits that depends on all parts and their order; parts have 64 bits, as torch's seeds have."""
    words = struct.pack(f"<{len(parts)}Q", *(part % 2**64 for part in parts))
    digest = hashlib.blake2b(words, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def set_random_state(seed: int, device: torch.device) -> None:
    """Seeds the random numbers of Python, of NumPy, of torch on the CPU and, if ``device`` is a GPU, on that GPU."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def random_states(device: torch.device) -> tuple[Any, ...]:
    """The states of the generators that :func:`set_random_state` seeds."""
    return random.getstate(), numpy.random.get_state(), *torch_random_states(device)


def restore_random_states(states: tuple[Any, ...], device: torch.device) -> None:
    """Gives the generators the states that :func:`random_states` has returned, on this rank or on another one."""
    python_state, numpy_state, torch_state, *gpu_states = states
    random.setstate(python_state)
    numpy.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
    for gpu_state in gpu_states:
        torch.cuda.set_rng_state(gpu_state, device)


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Restores at the end of the block the random states that :func:`set_random_state` sets."""
    states = random_states(device)
    try:
        yield
    finally:
        restore_random_states(states, device)


def other_random_states() -> tuple[Any, ...]:
    """The states of the generators of Python and NumPy, to compare."""
    state: Any = numpy.random.get_state()
    _, keys, *rest = state
    return (random.getstate(), keys.tobytes(), *rest)


def torch_random_states(device: torch.device) -> list[Tensor]:
    """The states of torch's generators of the CPU and, if ``device`` is a GPU, of that GPU, to compare."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


class OwnDraws:
    """Torch's generators of one rank, whose states go on from step to step."""

    def __init__(self) -> None:
        self._states: list[Tensor] = []

    @contextmanager
    def drawn(self, device: torch.device, rank: int) -> Iterator[None]:
        """Within the block torch's generators, of the CPU and of ``device``, give other numbers than on other ranks."""
        generators = [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index or 0])
        before = [generator.get_state() for generator in generators]
        for number, generator in enumerate(generators):
            if self._states:
                generator.set_state(self._states[number])
            else:
                generator.manual_seed(seed_of(generator.initial_seed(), rank))
        try:
            yield
        finally:
            self._states = [generator.get_state() for generator in generators]
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)


@contextmanager
def without_differentiation() -> Iterator[None]:
    """Refuses ``loss.backward()``, and gradients of other stages' parameters, in the step that the block runs.

    Raises:
        PipelineError: the step asks for either; a stage would get only its own part of such gradients.
    """
    grad = torch.autograd.grad

    def refuse(what: str) -> None:
        raise PipelineError(
            f"the step {what}, and a pipeline cannot differentiate across stages within a step; return the loss, and "
            "leave backward to Lightning, or use ring_ddp"
        )

    def checked(*args: Any, **kwargs: Any) -> Any:
        lost = first_placeholder((args, kwargs))
        if lost is not None:
            refuse(f"computes a gradient with respect to {lost.source}, which is on another stage")
        return grad(*args, **kwargs)

    with replaced(torch.autograd, backward=lambda *args, **kwargs: refuse("calls backward"), grad=checked):
        yield


@contextmanager
def preserved_state(module: Module) -> Iterator[None]:
    """Restores at the end of the block what a forward pass may change in a module and its children.

    It restores buffers, attributes (states of torchmetrics among them), the contents of lists, dictionaries, sets and
    deques in attributes, attributes of objects of the user's own classes, random generators, training mode, and which
    parameters are trained. It restores neither values of parameters nor the state of objects of libraries.
    """
    undo: list[Callable[[], Any]] = []
    seen: set[int] = set()
    for part in module.modules():
        _keep(vars(part), undo, seen)
    try:
        yield
    finally:
        with torch.no_grad():
            for restore in undo:
                restore()


@contextmanager
def preserved_values(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Restores at the end of the block the values of parameters, which a step may set; yields copies in host memory."""
    before = [(parameter, parameter.data, parameter.detach().to("cpu", copy=True)) for parameter in parameters]
    try:
        yield [value for _, _, value in before]
    finally:
        for parameter, data, value in before:
            data.copy_(value)
            parameter.data = data


@contextmanager
def without_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Takes the gradients away at the beginning of the block, and puts them back at its end."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


# Most values of a module, which would take most of the time.
_CANNOT_CHANGE = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})


def _keep(value: Any, undo: list[Callable[[], Any]], seen: set[int]) -> None:
    """Adds to ``undo`` functions that restore ``value``, and everything in it, in place."""
    if type(value) in _CANNOT_CHANGE or id(value) in seen:
        return
    seen.add(id(value))
    entries: Iterable[Any] = ()
    if isinstance(value, dict):
        _keep_dict(value, undo)
        entries = list(value.values())
    elif isinstance(value, tuple):
        entries = value
    elif isinstance(value, list | deque):
        entries = list(value)
        _keep_contents(value, entries, value.extend, undo)
    elif isinstance(value, set):
        _keep_contents(value, set(value), value.update, undo)
    elif isinstance(value, Tensor):
        _keep_tensor(value, undo)
    elif isinstance(value, torch.Generator):
        state = value.get_state()
        undo.append(lambda: value.set_state(state))
    elif is_users(value):
        _keep(vars(value), undo, seen)
    for entry in entries:
        _keep(entry, undo, seen)


def is_users(value: object) -> bool:
    """Whether a value of a module's attribute is an object of a user's class, in which a step may keep something."""
    library = type(value).__module__.partition(".")[0]
    return (
        hasattr(value, "__dict__") and not isinstance(value, type | Module | Dataset) and library not in _LIBRARIES
    ) or isinstance(value, SimpleNamespace)


_LIBRARIES = frozenset(
    (
        *("torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_multigpu", "transformers", "numpy"),
        *("builtins", "collections", "types", "functools", "weakref", "threading", "logging", "omegaconf"),
    )
)


def _keep_tensor(tensor: Tensor, undo: list[Callable[[], Any]]) -> None:
    if isinstance(tensor, Parameter):
        is_trained = tensor.requires_grad
        undo.append(lambda: tensor.requires_grad_(is_trained))
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


def _keep_dict(table: dict[Any, Any], undo: list[Callable[[], Any]]) -> None:
    if not table:  # as most tables of hooks
        undo.append(table.clear)
        return
    before = dict(table)

    def restore() -> None:
        dict.update(table, before)  # no attribute is ever missing, since other threads may read it
        for name in [name for name in table if name not in before]:
            del table[name]

    undo.append(restore)


def _keep_contents(container: Any, before: Any, fill: Callable[[Any], Any], undo: list[Callable[[], Any]]) -> None:
    def restore() -> None:
        container.clear()
        fill(before)

    undo.append(restore)
