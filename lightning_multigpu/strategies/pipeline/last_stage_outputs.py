"""Values that the user's steps return or keep on the last stage, copied to the other stages for their hooks.

::

    def validation_step(self, batch, batch_idx):
        ...
        self.losses.append(loss)  # reached on the last stage only

    def on_validation_epoch_end(self):  # called on every stage
        self.log("mean", torch.stack(self.losses).mean())
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_multigpu._lightning_internals import attributes_of_lightning
from lightning_multigpu.communication.tensors import marks_of
from lightning_multigpu.engine.pipeline.stages.stage_messages import PipelineGroup
from lightning_multigpu.engine.placeholder import first_placeholder
from lightning_multigpu.strategies.steps.hook_detection import has_hook

_DEPTH = 3
_LARGEST = 16  # entries of a container whose own containers are compared: it is done twice a batch
_LARGEST_COMPARED = 256  # entries of a container whose entries are compared by identity
_PLAIN = (type(None), bool, int, float, str)


class LastStageOutputs(Callback):
    """Gives the hooks of every stage the values that steps returned, and kept in the module, on the last stage.

    It is the first of the Trainer's callbacks. After a training batch it replaces the loss in Lightning's outputs by
    the loss and the further outputs that the pipeline has computed since. At the end of an epoch it copies attributes
    of the module that steps have changed. An attribute counts as changed when it is assigned, when a tensor in it is
    changed in place, or when a list, dictionary, set or deque gets another length or, with at most 256 entries, another
    entry; containers of at most 16 entries are looked into, three levels deep. Other objects are compared by identity.
    Attributes of submodules are not copied. ``at_end`` is called when a training batch has ended, and when an error
    ends the run.
    """

    def __init__(
        self, module: pl.LightningModule, group: PipelineGroup, *, is_last: bool, at_end: Callable[[], object]
    ) -> None:
        self.of_batch: dict[str, Any] = {}
        self._module = module
        self._group = group
        self._is_last = is_last
        self._at_end = at_end
        self._changed: dict[str, None] = {}

    # Among the callbacks

    def add_first(self, *, leaves: bool = False) -> None:
        """Adds this callback before the others if it is not there (a Tuner replaces the list), or removes it."""
        callbacks: list[Callback] = self._module.trainer.callbacks  # type: ignore[attr-defined]
        if leaves and self in callbacks:
            callbacks.remove(self)
        elif not leaves and self not in callbacks:
            callbacks.insert(0, self)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._at_end()
        if isinstance(outputs, dict) and "loss" in outputs:
            outputs.update(self.of_batch)
        self.of_batch = {}

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._at_end()

    # Outputs of a step

    def from_last(self, message: Any, output: Any, hook: str | None) -> tuple[Any, Any]:
        """The last stage's message and, where the user's code has the ``hook``, its output of a step. A collective.

        With None as the hook it is a prediction, which every stage gets; an empty list if it cannot be pickled.
        """
        package = None
        if self._is_last and output is not None and (hook is None or has_hook(hook, self._module)):
            package = packed(output, "the output of predict_step" if hook is None else f"the argument of {hook}")
        message, package = self._group.from_last((message, package))
        if self._is_last or package is None:
            return message, output if self._is_last or hook is not None else []
        return message, unpacked(package, self._module.device)

    # Attributes of the module

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes which attributes change within the block."""
        before = self._marks()
        try:
            yield
        finally:
            for name, mark in self._marks().items():
                if name not in before or before[name] != mark:
                    self._changed[name] = None

    def _share(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copies attributes that have changed on the last stage since the last call to all stages. A collective.

        Lists, dictionaries, sets and deques stay the same objects on every stage, with new contents. An attribute that
        cannot be pickled, or was computed from values of other stages, is not copied; a warning says so.
        """
        found: dict[str, bytes | None] = {}
        if self._is_last:
            attributes = vars(self._module)
            found = {n: packed(attributes[n], f"self.{n}") for n in self._changed if n in attributes}
        packages = {name: package for name, package in found.items() if package is not None}
        given = self._group.from_last(packages)
        self._changed.clear()
        if not self._is_last:
            for name, package in given.items():
                self._set(name, unpacked(package, self._module.device))
        self._group.finish()

    on_train_epoch_end = on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = _share
    on_validation_start = _share  # values that training steps have kept: their epoch has not ended

    def _set(self, name: str, value: Any) -> None:
        old = vars(self._module).get(name)
        if type(old) is not type(value) or not isinstance(old, list | dict | set | deque):
            setattr(self._module, name, value)
        else:
            old.clear()
            fill: Any = old.extend if isinstance(old, list | deque) else old.update
            fill(value)

    def _marks(self) -> dict[str, Any]:
        return {
            name: mark(value) for name, value in vars(self._module).items() if name not in attributes_of_lightning()
        }


def mark(value: Any, depth: int = _DEPTH) -> Any:
    """A value that is different after a change, and quick to compute."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return id(value), marks_of([value])
    if isinstance(value, list | tuple | dict | set | frozenset | deque):
        entries: Iterable[Any] = value.values() if isinstance(value, Mapping) else value
        if len(value) > _LARGEST:
            return id(value), len(value), [*map(id, entries)] if len(value) <= _LARGEST_COMPARED else []
        within = [mark(entry, depth - 1) for entry in entries] if depth else []
        return id(value), len(value), within
    return id(value)


@dataclass
class _OnDevice:
    """A tensor from the sender's device, in host memory."""

    tensor: Tensor


def packed(value: Any, name: str) -> bytes | None:
    """The value as bytes, for :func:`unpacked`; None, with a warning that calls the value ``name``, if impossible."""
    lost = first_placeholder(value)
    if lost is not None:
        rank_zero_warn(f"{name} stays on the last stage: it has been computed from {lost.source}")
        return None
    try:
        return pickle.dumps(tree_map_only(Tensor, _on_host, value))
    except Exception as error:  # any class may come from an object's own method
        rank_zero_warn(f"{name} stays on the last stage, because it cannot be pickled: {error}")
        return None


def unpacked(data: bytes, device: torch.device) -> Any:
    """The value again; tensors that were not in host memory are on ``device``."""
    return tree_map_only(_OnDevice, lambda moved: moved.tensor.to(device), pickle.loads(data))


def _on_host(tensor: Tensor) -> Tensor | _OnDevice:
    # A copy: pickle takes all memory that a view is a part of.
    copy = tensor.detach().to("cpu", copy=True)
    return copy if tensor.device.type == "cpu" else _OnDevice(copy)
