"""What user code makes of split weights and keeps, such as averages, masks and copies of layers: whole for others."""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lightning_multigpu.engine.tensor_split.layers import SplitLayer, restore
from lightning_multigpu.engine.tensor_split.parts import SplitParameter, SplitTensor, make_whole, whole_parameter
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup


def whole_values(checkpoint: Mapping[str, Any], group: TensorGroup) -> dict[str, Any]:
    """The checkpoint with whole tensors for parts, also within objects; a collective of the group.

    An entry that cannot be pickled stays as it is.

    Raises:
        RuntimeError: the ranks' checkpoints have different parts.
    """
    pickles = {key: _Pickle(value) for key, value in checkpoint.items()}
    parts = {id(part): part for each in pickles.values() for part in each.tensors if isinstance(part, SplitTensor)}
    group.agree_on_read(f"a checkpoint of {_described([*parts.values()])}")
    whole = {key: _whole(part) for key, part in parts.items()}
    return {
        key: pickles[key].copy(whole) if any(id(tensor) in whole for tensor in pickles[key].tensors) else value
        for key, value in checkpoint.items()
    }


def make_whole_on_all(group: TensorGroup) -> bool:
    """Makes all parts that live, and all layers that are split, whole; a collective of the group.

    Returns whether the ranks have the same parts; else those stay as they are.
    """
    gc.collect()  # what lives in a cycle may be gone on another rank
    objects = gc.get_objects()
    layers = [each for each in objects if issubclass(type(each), SplitLayer) and each.part_layout.group is group]
    parts = [each for each in objects if issubclass(type(each), SplitTensor) and each.placed.group is group]
    parts.sort(key=lambda part: part.number)
    for layer in layers:
        restore(layer)
    if not group.are_alike(_described(parts)):
        return False
    for part, value in [(part, _whole(part)) for part in parts]:
        if isinstance(part, SplitParameter):
            part.grad = None
        make_whole(part, value)
    return True


def _described(parts: list[SplitTensor]) -> str:
    with torch._C.DisableTorchFunctionSubclass():
        found = (f"{p.placed.layer} {(*p.placed.split.whole_shape(p),)} {p.dtype}" for p in parts)
        return f"values of {', '.join(found) or 'no layer'}"


def _whole(part: SplitTensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        own = part.detach().as_subclass(Tensor)
        whole = part.placed.split.gather(own, part.placed.group, f"{part.placed.layer} kept").contiguous()
        return whole_parameter(part, whole) if isinstance(part, SplitParameter) else whole


class _Pickle:
    """A pickled value, without the values of its tensors; ``tensors`` are those that it contains."""

    def __init__(self, value: Any) -> None:
        self.tensors: list[Tensor] = []
        self._bytes = io.BytesIO()
        pickler = pickle.Pickler(self._bytes)
        pickler.persistent_id = self._number_of  # type: ignore[method-assign]
        with suppress(Exception):  # of any object; who writes the checkpoint says so
            pickler.dump(value)

    def _number_of(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1

    def copy(self, replaced: Mapping[int, Tensor]) -> Any:
        """A copy of the value with the same tensors, but for those that are replaced, by the ids of the old ones."""
        unpickler = pickle.Unpickler(io.BytesIO(self._bytes.getvalue()))
        tensors = [replaced.get(id(tensor), tensor) for tensor in self.tensors]
        unpickler.persistent_load = tensors.__getitem__  # type: ignore[method-assign]
        return unpickler.load()
