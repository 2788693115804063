"""Bytes that training needs for parameters, gradients, optimizer states, and tensors saved for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_leaves

from lightning_multigpu.communication.tensors import size_bytes
from lightning_multigpu.engine.optimizer_state import held_states
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.tensor_split.parts import SplitTensor, local
from lightning_multigpu.planning.pipelines.timeline import HeldBytes

_STATES = 2  # tensors of a parameter's size that an optimizer other than SGD is assumed to keep: Adam's moments


def held_bytes(parameters: Iterable[Tensor], optimizers: Sequence[Optimizer]) -> HeldBytes:
    """Bytes that a rank needs in training for the parameters that it holds."""
    with torch._C.DisableTorchFunctionSubclass():  # of split parameters these are the parts
        states: dict[Tensor, int] = {}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                count = bool(group["momentum"]) if isinstance(optimizer, SGD) else _STATES
                states.update(dict.fromkeys(group["params"], count))
        sizes = {parameter: parameter.nbytes for parameter in parameters}
        trained = {parameter: size for parameter, size in sizes.items() if parameter.requires_grad}
        return HeldBytes(
            sum(sizes.values()),
            sum(trained.values()),
            sum(size * states.get(parameter, 0) for parameter, size in trained.items()),
        )


def measured_bytes(parameters: Iterable[Tensor], optimizers: Sequence[Optimizer]) -> HeldBytes:
    """Bytes that a rank holds at present; placeholders of tensors that other ranks hold do not count."""
    with torch._C.DisableTorchFunctionSubclass():  # of split parameters these are the parts
        held = [parameter for parameter in parameters if not isinstance(parameter, Placeholder)]
        states = tree_leaves([list(held_states(optimizer).values()) for optimizer in optimizers])
        return HeldBytes(
            sum(map(size_bytes, held)),
            sum(size_bytes(parameter.grad) for parameter in held if parameter.grad is not None),
            sum(size_bytes(s) for s in states if isinstance(s, Tensor) and not isinstance(s, Placeholder)),
        )


class SavedTensors:
    """Counts the bytes that each part of a step saves for backward; each storage counts once in the whole step.

    Args:
        held: parameters and buffers, which do not count; None counts nothing at all.

    Attributes:
        part: the part that is running.
        size_bytes: bytes of each part, so far.
        input_bytes: the bytes among ``size_bytes`` that are input of the part.
    """

    def __init__(self, held: Sequence[Tensor] | None) -> None:
        self.part = 0
        self.size_bytes: dict[int, int] = {}
        self.input_bytes: dict[int, int] = {}
        self.counts = held is not None
        self._seen = {_address(tensor) for tensor in held or ()}
        self._kept: list[Tensor] = []  # kept alive, so that no other tensor gets the same address
        self._copies: dict[int, int] = {}

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts what autograd saves within the block."""
        if not self.counts:
            yield
            return
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield
        self._kept.clear()

    def detached_copy(self, tensor: Tensor) -> Tensor:
        """The same values without autograd history; a saved copy counts as the saved tensor."""
        if isinstance(tensor, SplitTensor):
            return SplitTensor.of(self.detached_copy(local(tensor)), tensor.placed)  # type: ignore[no-any-return]
        if isinstance(tensor, Placeholder) or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        copy = tensor.detach().requires_grad_(tensor.requires_grad).clone()
        if self.counts:
            self._copies[_address(copy)] = _address(tensor)
            self._kept += [copy.detach(), tensor.detach()]
        return copy

    def _pack(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, Placeholder):
            return tensor
        kept = tensor.detach()  # autograd forbids to keep the tensor itself
        address = _address(tensor)
        original = self._copies.get(address, address)
        if original not in self._seen:
            self._seen.add(original)
            self._kept.append(kept)
            size_bytes = tensor.untyped_storage().nbytes()
            self.size_bytes[self.part] = self.size_bytes.get(self.part, 0) + size_bytes
            if original != address:  # copies are made of the inputs of a part
                self.input_bytes[self.part] = self.input_bytes.get(self.part, 0) + size_bytes
        return kept


class SavedActivations:
    """Counts the bytes that autograd holds for backward at a time: each storage once, until it is freed.

    Parameters and buffers that are ``held`` do not count.
    """

    def __init__(self, held: Sequence[Tensor]) -> None:
        self.size_bytes = 0
        self.peak_bytes = 0
        self._held = {_address(tensor) for tensor in held if not isinstance(tensor, Placeholder)}
        self._users: dict[int, int] = {}
        self._lock = RLock()  # replicas save in threads; a tensor may be freed while another is packed

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts what autograd saves within the block, until it is freed, even after the block."""
        with saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
            yield

    def _pack(self, tensor: Tensor) -> _Saved:
        kept = tensor.detach()  # autograd forbids to keep the tensor itself
        if isinstance(tensor, Placeholder) or not torch._C._has_storage(tensor):
            return _Saved(kept)
        address = _address(tensor)
        if address in self._held:
            return _Saved(kept)
        with self._lock:
            users = self._users.get(address, 0)
            self._users[address] = users + 1
            if not users:
                self.size_bytes += kept.untyped_storage().nbytes()
                self.peak_bytes = max(self.peak_bytes, self.size_bytes)
        return _Saved(kept, self._freed)

    def _freed(self, tensor: Tensor) -> None:
        address = _address(tensor)
        with self._lock:
            self._users[address] -= 1
            if not self._users[address]:
                del self._users[address]
                self.size_bytes -= tensor.untyped_storage().nbytes()


class _Saved:
    """A tensor saved by autograd; ``freed`` is called with it when autograd drops it."""

    def __init__(self, tensor: Tensor, freed: Callable[[Tensor], None] | None = None) -> None:
        self.tensor = tensor
        self._freed = freed

    def __del__(self) -> None:
        if self._freed is not None:
            self._freed(self.tensor)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
