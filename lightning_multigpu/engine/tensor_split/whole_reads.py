"""Parameters and gradients of split layers that user code reads as if they were whole.

Within :class:`WholeReads` operations on them give what they give on one device::

    p.grad.clamp_(-1, 1), p.grad * 2    each element by itself: on this rank's part
    p.grad.norm(), p.grad[0], p.shape   anything else: on the gathered tensor, by all ranks
    p.grad[0] = 0                       entries: on the gathered tensor, of which each rank then takes its part
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from lightning_multigpu.engine.tensor_split.parameter_split import ParameterSplit, split_of
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup

_SIZES = (Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement, torch.numel)  # type: ignore[attr-defined]
_ON_WHOLE = (Tensor.__setitem__, Tensor.numpy, Tensor.tolist)


class WholeReads(TorchFunctionMode):
    """Within the block parameters of split layers, and their gradients, read as whole ones.

    Args:
        group: the ranks that hold parts; all of them have to read the same.

    Raises:
        RuntimeError: at the end of the block, if a view of a gathered tensor was changed, which changes no rank's part.
    """

    def __init__(self, group: TensorGroup) -> None:
        super().__init__()
        self._group = group
        self._parts: Any = WeakIdKeyDictionary()
        self._gathered: list[tuple[str, Tensor, int]] = []

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        changed = [name for name, counter, version in self._gathered if counter._version != version]
        self._gathered = []
        if changed and error is None:
            raise RuntimeError(
                f"a view that {changed[0]} has given of a split layer's parameter or gradient was changed, and each "
                "rank has a part of it, which does not change: assign to the tensor itself, as in p.grad[0] = value"
            )

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = [(each, split) for each in _tensors((args, kwargs)) if (split := self._split_of(each)) is not None]
        if not found:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if func in _SIZES:
            return func(self._whole_size(*found[0]), *args[1:], **kwargs)
        if func in _ON_WHOLE:
            return self._on_whole(func, name, found, args, kwargs)
        result = func(*args, **kwargs)
        if (name.endswith("_") and not name.endswith("__")) or name == "__set__":
            return result
        first = list(_tensors(args[:1]))
        results = list(_tensors(result))
        if len(results) == len(first) and all(a.shape == b.shape for a, b in zip(first, results, strict=True)):
            for a, b in zip(first, results, strict=True):
                self._parts[b] = self._split_of(a)
            return result
        return self._on_whole(func, name, found, args, kwargs)

    def _split_of(self, tensor: Tensor) -> ParameterSplit | None:
        return split_of(tensor) or self._parts.get(tensor)

    def _whole_size(self, part: Tensor, split: ParameterSplit) -> Tensor:
        shape = list(part.shape)
        shape[split.dim] = split.whole_size
        return torch.empty(shape, dtype=part.dtype, device="meta")

    def _on_whole(
        self, func: Any, name: str, found: list[tuple[Tensor, ParameterSplit]], args: Any, kwargs: Any
    ) -> Any:
        whole = {
            id(part): split.gather(part.detach(), self._group, f"{name} of a whole tensor") for part, split in found
        }
        versions = {key: tensor._version for key, tensor in whole.items()}
        result = func(*_replaced(args, whole), **_replaced(kwargs, whole))
        for part, split in found:
            gathered = whole[id(part)]
            if gathered._version != versions[id(part)]:
                part.copy_(split.part(gathered, self._group.rank))
            counter = gathered.detach()
            counter.data = torch.empty(0)  # keeps the counter, and not the memory
            self._gathered.append((name, counter, gathered._version))
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _replaced(value: Any, by_id: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return by_id.get(id(value), value)
    if isinstance(value, list | tuple):
        return type(value)(_replaced(each, by_id) for each in value)
    if isinstance(value, dict):
        return {key: _replaced(each, by_id) for key, each in value.items()}
    return value
