"""Bytes that parameters, their gradients and their optimizer states take in training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from lightning_multigpu.engine.pipeline.splitting.chain import Chain
from lightning_multigpu.engine.pipeline.splitting.placeholder import Placeholder
from lightning_multigpu.planning.stage_costs import HeldBytes

UNKNOWN_STATES = 2
"""Tensors of a parameter's size that an optimizer is taken to keep where it is none of torch's: those of Adam."""

_STATES: dict[type[Optimizer], Callable[[dict[str, object]], int]] = {
    SGD: lambda group: bool(group["momentum"]),
    Adam: lambda group: 2 + bool(group["amsgrad"]),
    AdamW: lambda group: 2 + bool(group["amsgrad"]),
    NAdam: lambda group: 2,
    RAdam: lambda group: 2,
    Adamax: lambda group: 2,
    Adadelta: lambda group: 2,
    ASGD: lambda group: 1,
    Rprop: lambda group: 2,
    Adagrad: lambda group: 1,
    RMSprop: lambda group: 1 + bool(group["momentum"]) + bool(group["centered"]),
}


def held_bytes(parameters: Iterable[Parameter], optimizers: Sequence[Optimizer]) -> HeldBytes:
    """What a rank that holds the parameters needs for them in training."""
    states: dict[Tensor, int] = {}
    for optimizer in optimizers:
        count = _STATES.get(type(optimizer))
        for group in optimizer.param_groups:
            states.update(dict.fromkeys(group["params"], UNKNOWN_STATES if count is None else count(group)))
    sizes = {parameter: parameter.numel() * parameter.element_size() for parameter in parameters}
    trained = {parameter: size for parameter, size in sizes.items() if parameter.requires_grad}
    return HeldBytes(
        sum(sizes.values()),
        sum(trained.values()),
        sum(size * states.get(parameter, 0) for parameter, size in trained.items()),
    )


def layer_bytes(chain: Chain, optimizers: Sequence[Optimizer]) -> list[int]:
    """Of each layer, the bytes of its parameters, their gradients and the states that the optimizers will keep.

    A parameter that an earlier layer has too counts for that one.
    """
    seen: set[Tensor] = set()
    sizes = []
    for layer in chain.layers:
        own = set(layer.parameters()) - seen
        seen |= own
        sizes.append(held_bytes(own, optimizers).total)
    return sizes


class SavedTensors:
    """Counts the bytes that parts of a step keep for backward, each piece of memory once.

    Args:
        held: parameters and buffers, which do not count; None to count nothing.

    Attributes:
        part: the one that is running.
        counts: whether anything is counted.
        size_bytes: of each part, so far.
        input_bytes: of each part, what is its input among these.
    """

    def __init__(self, held: Sequence[Tensor] | None) -> None:
        self.part = 0
        self.size_bytes: dict[int, int] = {}
        self.input_bytes: dict[int, int] = {}
        self.counts = held is not None
        self._seen = {_place(tensor) for tensor in held or ()}
        self._kept: list[Tensor] = []  # what is alive has a place of its own
        self._copies: dict[int, int] = {}

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Within the block what autograd saves is counted."""
        if not self.counts:
            yield
            return
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield
        self._kept.clear()

    def detached_copy(self, tensor: Tensor) -> Tensor:
        """The same values without their history; what is kept of the copy counts as kept of the tensor."""
        if isinstance(tensor, Placeholder) or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        copy = tensor.detach().requires_grad_(tensor.requires_grad).clone()
        if self.counts:
            self._copies[_place(copy)] = _place(tensor)
            self._kept += [copy.detach(), tensor.detach()]
        return copy

    def _pack(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, Placeholder):
            return tensor
        kept = tensor.detach()  # autograd forbids to keep the tensor itself
        place = _place(tensor)
        original = self._copies.get(place, place)
        if original not in self._seen:
            self._seen.add(original)
            self._kept.append(kept)
            size_bytes = tensor.untyped_storage().nbytes()
            self.size_bytes[self.part] = self.size_bytes.get(self.part, 0) + size_bytes
            if original != place:  # a copy is what a part is given
                self.input_bytes[self.part] = self.input_bytes.get(self.part, 0) + size_bytes
        return kept


class SavedActivations:
    """Follows how many bytes autograd keeps for backward at a time: each piece of memory once, until it is freed.

    Args:
        held: parameters and buffers, which do not count.

    Attributes:
        size_bytes: kept at present.
        peak_bytes: the most so far.
    """

    def __init__(self, held: Sequence[Tensor]) -> None:
        self.size_bytes = 0
        self.peak_bytes = 0
        self._held = {_place(tensor) for tensor in held}
        self._users: dict[int, int] = {}

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What autograd saves within the block is counted, also where it frees it later."""
        with saved_tensors_hooks(self._pack, _Kept.unpack):
            yield

    def _pack(self, tensor: Tensor) -> _Kept:
        kept = tensor.detach()  # autograd forbids to keep the tensor itself
        if isinstance(tensor, Placeholder) or not torch._C._has_storage(tensor):
            return _Kept(kept)
        place = _place(tensor)
        if place in self._held:
            return _Kept(kept)
        users = self._users.get(place, 0)
        self._users[place] = users + 1
        if not users:
            self.size_bytes += kept.untyped_storage().nbytes()
            self.peak_bytes = max(self.peak_bytes, self.size_bytes)
        return _Kept(kept, self._freed)

    def _freed(self, tensor: Tensor) -> None:
        place = _place(tensor)
        self._users[place] -= 1
        if not self._users[place]:
            del self._users[place]
            self.size_bytes -= tensor.untyped_storage().nbytes()


class _Kept:
    """A tensor that autograd keeps, and who is to know when it does so no longer."""

    def __init__(self, tensor: Tensor, freed: Callable[[Tensor], None] | None = None) -> None:
        self._tensor = tensor
        self._freed = freed

    def unpack(self) -> Tensor:
        return self._tensor

    def __del__(self) -> None:
        if self._freed is not None:
            self._freed(self._tensor)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
