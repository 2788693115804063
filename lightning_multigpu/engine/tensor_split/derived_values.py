"""Whole values of averages, masks and copies of layers that user code has made of split weights."""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
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
    tensors = {key: _Tensors(value).found for key, value in checkpoint.items()}
    parts = {id(part): part for found in tensors.values() for part in found if isinstance(part, SplitTensor)}
    group.agree_on_read(f"a checkpoint of {_described([*parts.values()])}")
    whole = {key: _whole(part) for key, part in parts.items()}
    written = dict(checkpoint)
    for key, found in tensors.items():
        if any(id(tensor) in whole for tensor in found):
            written[key] = deepcopy(checkpoint[key], {id(each): whole.get(id(each), each) for each in found})
    return written


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


class _Tensors(pickle.Pickler):
    """Finds the tensors that a pickle of a value contains; the pickle itself is thrown away."""

    def __init__(self, value: Any) -> None:
        super().__init__(io.BytesIO())
        self.found: list[Tensor] = []
        with suppress(Exception):  # of any object; who writes the checkpoint says so
            self.dump(value)

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self.found.append(value)
        return len(self.found)
