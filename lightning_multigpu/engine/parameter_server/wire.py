"""Tensors and plain values as they travel between workers and servers: JSON, and bytes beside it."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_multigpu.communication.compression.compressors import Bf16, ElementwiseCompressor, Fp16, Int8
from lightning_multigpu.communication.compression.factory import make_compressor

_PLAIN = (bool, int, float, str, type(None))
_MAX_DEPTH = 8


class WireError(ValueError):
    """A value that cannot travel, or what has arrived is none."""


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: object) -> torch.dtype:
    """The inverse of :func:`dtype_name`.

    Raises:
        WireError: there is no such dtype.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise WireError(f"{name!r} is no dtype")
    return dtype


def packed(value: Any, tensors: list[Tensor], *, what: str, depth: int = 0) -> Any:
    """A value as JSON can express it; its tensors are appended to ``tensors``, contiguous and in host memory.

    Args:
        value: numbers, also numpy's, texts, None and tensors, and lists, tuples and dictionaries of these.
        tensors: of the message so far.
        what: names the value in an error.
        depth: how deep the value is in others.

    Raises:
        WireError: it holds something else.
    """
    if isinstance(value, Tensor) and not value.is_sparse:
        tensors.append(value.detach().to("cpu").contiguous())
        return {"tensor": len(tensors) - 1, "dtype": dtype_name(value.dtype), "shape": list(value.shape)}
    if isinstance(value, numpy.generic):  # as schedulers get them from numpy's functions
        value = value.item()
    if type(value) in _PLAIN:
        return value
    if depth < _MAX_DEPTH and type(value) in (list, tuple):
        items = [packed(item, tensors, what=what, depth=depth + 1) for item in value]
        return items if type(value) is list else {"tuple": items}
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        return {"items": [[packed(k, tensors, what=what, depth=depth + 1),
                           packed(v, tensors, what=what, depth=depth + 1)] for k, v in value.items()]}  # fmt: skip
    raise WireError(
        f"{what} is of type {type(value).__qualname__}, which does not travel to a server: numbers, texts, tensors, "
        "and lists, tuples and dictionaries of these do"
    )


def unpacked(value: Any, tensors: Sequence[Tensor], *, depth: int = 0) -> Any:
    """The inverse of :func:`packed`.

    Raises:
        WireError: it is not of that form.
    """
    if type(value) in _PLAIN:
        return value
    if depth > _MAX_DEPTH:
        raise WireError(f"values more than {_MAX_DEPTH} deep")
    if isinstance(value, list):
        return [unpacked(item, tensors, depth=depth + 1) for item in value]
    if isinstance(value, dict):
        number = value.get("tensor")
        if type(number) is int and 0 <= number < len(tensors):
            return tensors[number]
        if isinstance(value.get("tuple"), list):
            return tuple(unpacked(value["tuple"], tensors, depth=depth + 1))
        if isinstance(items := value.get("items"), list) and all(isinstance(i, list) and len(i) == 2 for i in items):
            pairs = [(unpacked(k, tensors, depth=depth + 1), unpacked(v, tensors, depth=depth + 1)) for k, v in items]
            if all(type(k) in _PLAIN for k, _ in pairs):
                return dict(pairs)
    raise WireError(f"not a value of a message: {str(value)[:80]}")


def room_for(value: Any, payload_bytes: int) -> list[Tensor]:
    """Empty tensors for the payload of a packed value, in its order.

    Raises:
        WireError: they are not as long as the payload.
    """
    described: dict[int, Tensor] = {}
    left = payload_bytes
    pending = [(value, 0)]
    while pending:
        entry, depth = pending.pop()
        if depth > 2 * _MAX_DEPTH:
            raise WireError("values too deep")
        if isinstance(entry, list):
            pending += [(item, depth + 1) for item in entry]
        elif isinstance(entry, dict) and "tensor" in entry:
            number, shape = entry["tensor"], entry.get("shape")
            if type(number) is not int or not isinstance(shape, list) or number in described:
                raise WireError(f"not a tensor of a message: {str(entry)[:80]}")
            if len(shape) > 32 or any(type(size) is not int or not 0 <= size <= payload_bytes for size in shape):
                raise WireError(f"not the shape of a tensor: {str(shape)[:80]}")
            dtype = dtype_of(entry.get("dtype"))
            left -= math.prod(shape) * dtype.itemsize
            if left < 0:
                break
            described[number] = torch.empty(shape, dtype=dtype)
        elif isinstance(entry, dict):
            pending += [(item, depth + 1) for item in entry.values()]
    if left != 0 or sorted(described) != list(range(len(described))):
        raise WireError(f"the tensors of a message do not make up its {payload_bytes} bytes")
    return [described[number] for number in range(len(described))]


def class_path(optimizer: Optimizer) -> str:
    """Where a server finds the class of an optimizer.

    Raises:
        WireError: a server cannot import it.
    """
    kind = type(optimizer)
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise WireError(
            f"a parameter server cannot import {kind.__qualname__}, which is defined in "
            f"{'the script' if kind.__module__ == '__main__' else 'a function'}: move it to a module beside the script"
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def optimizer_class(path: object) -> type[Optimizer]:
    """The class that :func:`class_path` names.

    Raises:
        WireError: there is no such class of optimizers.
    """
    found: Any = None
    if isinstance(path, str):
        module, _, name = path.partition(":")
        try:
            found = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError, ValueError) as error:
            raise WireError(f"a parameter server cannot import the optimizer {path}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise WireError(f"{str(path)[:80]!r} is no class of optimizers")
    return found


def elementwise(compression: Any) -> ElementwiseCompressor | None:
    """The compressor that ``{"name": "int8", "chunk_size": 1024}`` describes; None for None.

    Raises:
        WireError: there is no such compressor, or none of pushes to servers.
    """
    if compression is None:
        return None
    try:
        found = make_compressor(compression)
    except (TypeError, ValueError) as error:
        raise WireError(str(error)) from error
    if not isinstance(found, Fp16 | Bf16 | Int8):
        raise WireError(f"compression={found.name!r} is not for pushes to servers: use 'fp16', 'bf16' or 'int8'")
    return found
