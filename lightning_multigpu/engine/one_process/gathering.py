"""Gathering of the replicas' outputs of a step into one output for the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def gathered(outputs: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
    """One output of a step from the outputs of the replicas, in their order.

    =============================================  =====================================================
    outputs of the replicas                        the output
    =============================================  =====================================================
    tensors of shape (samples of the part, ...)    one tensor of shape (samples of the batch, ...)
    tensors without dimensions, floats             their mean, weighted by the samples of the parts
    integer tensors without dimensions             their sum
    lists with an entry for each sample            one list
    mappings, other lists, tuples                  the same, with each entry gathered in this way
    None, or the same value on all replicas        that value
    anything else                                  a list with each replica's output
    =============================================  =====================================================

    Args:
        sizes: the samples of each replica's part.
        device: gets all tensors: the first replica's.
    """
    first = outputs[0]
    if all(output is first for output in outputs):
        return first
    if len({type(output) for output in outputs}) > 1:
        return list(outputs)
    if isinstance(first, Tensor):
        return _gathered_tensors([output.to(device) for output in outputs], sizes)
    if isinstance(first, float):
        return sum(output * size for output, size in zip(outputs, sizes, strict=True)) / sum(sizes)
    if isinstance(first, Mapping) and all(output.keys() == first.keys() for output in outputs):
        entries = {key: gathered([output[key] for output in outputs], sizes, device) for key in first}
        return entries if type(first) is dict else type(first)(entries)  # type: ignore[call-arg]
    if isinstance(first, list) and _has_entry_of_each_sample(outputs, sizes):
        return [on_device(entry, device) for output in outputs for entry in output]
    if isinstance(first, list | tuple) and len({len(output) for output in outputs}) == 1:
        parts = [gathered(entries, sizes, device) for entries in zip(*outputs, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    try:
        is_same = all(bool(output == first) for output in outputs)
    except (TypeError, ValueError, RuntimeError):
        is_same = False
    return first if is_same else list(outputs)


def _gathered_tensors(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor | list[Tensor]:
    if all(tensor.ndim == 0 for tensor in tensors):
        if not tensors[0].is_floating_point():
            return torch.stack([*tensors]).sum()
        weights = torch.tensor(sizes, dtype=tensors[0].dtype, device=tensors[0].device)
        return (torch.stack([*tensors]) * weights).sum() / sum(sizes)
    if len({tensor.shape[1:] for tensor in tensors}) == 1 and all(tensor.ndim for tensor in tensors):
        return torch.cat([*tensors])
    return list(tensors)


def _has_entry_of_each_sample(outputs: Sequence[list[Any]], sizes: Sequence[int]) -> bool:
    if any(len(output) != size for output, size in zip(outputs, sizes, strict=True)):
        return False
    entries = [(entry, size) for output, size in zip(outputs, sizes, strict=True) for entry in output]
    return not entries or not all(isinstance(e, Tensor) and e.ndim and len(e) == size for e, size in entries)


def on_device(value: Any, device: torch.device) -> Any:
    """A tensor on the device; any other value as it is."""
    return value.to(device) if isinstance(value, Tensor) else value
