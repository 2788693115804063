"""Sizes of tensors, and groups of tensors that are sent as one flat tensor."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def size_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; for a sparse tensor, of its indices and values."""
    if tensor.is_sparse:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def marks_of(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """The version and the address of each tensor's values; either is another one after each change.

    ``tensor.data = ...`` changes the address alone.
    """
    with torch._C.DisableTorchFunctionSubclass():  # of split tensors these are the parts
        return [
            (0 if each.is_inference() else each._version, each.data_ptr() if each.layout == torch.strided else 0)
            for each in tensors
        ]


def same_bytes(first: Tensor, second: Tensor) -> bool:
    """Whether two contiguous tensors of the host have the same bytes; it takes 0.4 of the time of a checksum."""
    sizes = first.nbytes, second.nbytes
    return sizes[0] == sizes[1] and _memcmp(first.data_ptr(), second.data_ptr(), first.nbytes) == 0


def check_reducible(tensor: Tensor, what: str, *, average: bool = False) -> None:
    """Checks that ``what`` can reduce a tensor in the host's memory.

    Raises:
        ValueError: the tensor is not dense, on the CPU and contiguous, or an average of integers is asked for.
    """
    if not tensor.is_cpu or tensor.layout != torch.strided:
        raise ValueError(f"{what} takes dense CPU tensors, not {tensor.layout} on {tensor.device}: move it first")
    if not tensor.is_contiguous():
        raise ValueError(f"{what} takes contiguous tensors, strides are {tensor.stride()}: call .contiguous()")
    if average and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"the average of {tensor.dtype} values is no {tensor.dtype}: convert to a float dtype first")


def alike(tensors: Iterable[Tensor], *, full_bytes: float = math.inf) -> Iterator[list[Tensor]]:
    """Groups of tensors of one dtype and device, in their order; a group of ``full_bytes`` or more is complete."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        groups.setdefault(kind, []).append(tensor)
        sizes[kind] = sizes.get(kind, 0) + tensor.nbytes
        if sizes[kind] >= full_bytes:
            yield groups.pop(kind)
            del sizes[kind]
    yield from groups.values()


def apply_flat(work: Callable[[Tensor], object], tensors: Sequence[Tensor]) -> None:
    """Calls ``work``, which changes a flat copy of the tensors in place, and copies the result into the tensors.

    Args:
        work: takes a contiguous, one-dimensional tensor.
        tensors: all have the same dtype and device.
    """
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    work(flat)
    for tensor, part in zip(tensors, flat.split_with_sizes([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
