"""How much of what a step computes is kept for its backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_multigpu.engine.pipeline.stand_in import StandIn


class SavedTensors:
    """Counts the bytes that parts of a step keep for backward, each piece of memory once.

    Args:
        held: parameters and buffers, which do not count; None to count nothing.

    Attributes:
        part: the one that is running.
        size_bytes: of each part, so far.
    """

    def __init__(self, held: Sequence[Tensor] | None) -> None:
        self.part = 0
        self.size_bytes: dict[int, int] = {}
        self._counts = held is not None
        self._seen = {_place(tensor) for tensor in held or ()}
        self._kept: list[Tensor] = []  # what is alive has a place of its own
        self._copies: dict[int, int] = {}

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Within the block what autograd saves is counted."""
        if not self._counts:
            yield
            return
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield
        self._kept.clear()

    def detached_copy(self, tensor: Tensor) -> Tensor:
        """The same values without their history; what is kept of the copy counts as kept of the tensor."""
        if isinstance(tensor, StandIn) or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        copy = tensor.detach().requires_grad_(tensor.requires_grad).clone()
        if self._counts:
            self._copies[_place(copy)] = _place(tensor)
            self._kept += [copy.detach(), tensor.detach()]
        return copy

    def _pack(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, StandIn):
            return tensor
        kept = tensor.detach()  # autograd forbids to keep the tensor itself
        place = _place(tensor)
        place = self._copies.get(place, place)
        if place not in self._seen:
            self._seen.add(place)
            self._kept.append(kept)
            size_bytes = tensor.untyped_storage().nbytes()
            self.size_bytes[self.part] = self.size_bytes.get(self.part, 0) + size_bytes
        return kept


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
