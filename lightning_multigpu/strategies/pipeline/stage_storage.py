"""What the user's steps keep in the module or return, on the last stage, brought to the stages where hooks look at it.

::

    def validation_step(self, batch, batch_idx):
        ...
        self.losses.append(loss)  # only the last stage comes here

    def on_validation_epoch_end(self):  # all stages do this
        self.log("mean", torch.stack(self.losses).mean())
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_multigpu.engine.pipeline.splitting.placeholder import first_placeholder
from lightning_multigpu.engine.pipeline.stages.stage_messages import PipelineGroup

_Marks = dict[str, Any]
_DEPTH = 3
_LOOKED_INTO = 16  # entries of a container that may be containers themselves: it is done twice a micro-batch
_PLAIN = (type(None), bool, int, float, str)


class StageStorage:
    """Notes which attributes of the module steps change, and gives all stages those of the last one.

    Attributes are noted where they are set to something else, where a tensor in them is changed in place, and where a
    list, dictionary, set or deque gets another length, also up to three levels within containers of at most 16 entries.
    Other objects are compared by identity. Those of submodules are left alone.

    Args:
        module: the user's module.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        # As a list: Lightning's own may come and go. Those of the hyperparameters come with save_hyperparameters().
        self._not_ours = {*vars(pl.LightningModule()), "_hparams", "_hparams_name", "_hparams_initial"}
        self._changed: dict[str, None] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes what is changed within the block."""
        before = self._marks()
        try:
            yield
        finally:
            for name, mark in self._marks().items():
                if name not in before or before[name] != mark:
                    self._changed[name] = None

    def share(self, line: PipelineGroup, *, is_last: bool) -> None:
        """Gives all stages what the last one has noted since the last time. A collective of the pipeline.

        Lists, dictionaries, sets and deques stay the same objects on every stage, with new contents. What cannot be
        pickled, or has been computed from values of other stages, stays where it is, with a warning.
        """
        given = line.from_last(self._packed() if is_last else None)
        self._changed.clear()
        if not is_last:
            for name, data in given.items():
                self._set(name, unpacked(data, self._module.device))
        line.finish()

    def _packed(self) -> dict[str, bytes]:
        found = {name: vars(self._module)[name] for name in self._changed if name in vars(self._module)}
        packages = {name: packed(value, f"self.{name}") for name, value in found.items()}
        return {name: package for name, package in packages.items() if package is not None}

    def _set(self, name: str, value: Any) -> None:
        old = vars(self._module).get(name)
        if type(old) is not type(value) or not isinstance(old, list | dict | set | deque):
            setattr(self._module, name, value)
        else:
            old.clear()
            fill: Any = old.extend if isinstance(old, list | deque) else old.update
            fill(value)

    def _marks(self) -> _Marks:
        return {name: _mark(value) for name, value in vars(self._module).items() if name not in self._not_ours}


@dataclass
class _OnDevice:
    """A tensor of the sender's device, in the host's memory."""

    tensor: Tensor


def packed(value: Any, name: str) -> bytes | None:
    """The value as bytes, for :func:`unpacked`; None, with a warning about ``name``, where that cannot be."""
    lost = first_placeholder(value)
    if lost is not None:
        rank_zero_warn(f"{name} stays on the last stage: it has been computed from {lost.source}")
        return None
    try:
        return pickle.dumps(tree_map_only(Tensor, _on_host, value))
    except Exception as error:  # whatever an object's own method raises
        rank_zero_warn(f"{name} stays on the last stage, because it cannot be pickled: {error}")
        return None


def unpacked(data: bytes, device: torch.device) -> Any:
    """The value again; tensors that were not in the host's memory are on ``device``."""
    return tree_map_only(_OnDevice, lambda moved: moved.tensor.to(device), pickle.loads(data))


def _on_host(tensor: Tensor) -> Tensor | _OnDevice:
    # A copy: pickle takes the whole memory that a view is a part of.
    copy = tensor.detach().to("cpu", copy=True)
    return copy if tensor.device.type == "cpu" else _OnDevice(copy)


def _mark(value: Any, depth: int = _DEPTH) -> Any:
    """Something that differs after a change, and takes no time to make."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else value._version
    if isinstance(value, list | tuple | dict | set | frozenset | deque):
        entries: Iterable[Any] = value.values() if isinstance(value, Mapping) else value
        within = [_mark(entry, depth - 1) for entry in entries] if depth and len(value) <= _LOOKED_INTO else []
        return id(value), len(value), within
    return id(value)
