"""Metered collectives on tensors, Python objects and scalars over one process group."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.metering.collective_observer import ranks_text
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.tensors import alike, apply_flat

_REDUCTIONS: dict[str, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
    "product": dist.ReduceOp.PRODUCT,
}


class MeteredGroup:
    """The collectives that strategies need besides the exchange of gradients, over one process group.

    Args:
        group: the ranks.
        meter: records every transfer.
        name: the meter's name for the group.
        device: the device of the back end's tensors.
    """

    def __init__(self, group: dist.ProcessGroup, meter: Meter, *, name: str, device: torch.device) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)
        self.first_rank = self.ranks[0]
        self._ranks = ranks_text(self.ranks)
        self._meter = meter
        self._name = name
        self._device = device

    def all_reduce(self, tensor: Tensor, reduction: str | dist.ReduceOp.RedOpType | None) -> Tensor:
        """A new tensor with the reduced values, the same on every rank.

        Means of integers are floating-point numbers (torch's default dtype), sums of booleans are integers.

        Args:
            tensor: any shape, on any device; the same shape and dtype on every rank.
            reduction: "sum" (also None), "mean" or "avg", "min", "max", "prod", or a ``ReduceOp``.

        Raises:
            ValueError: the reduction is none of these.
        """
        op, average = _reduction(reduction)
        value = tensor.detach().to(self._device, copy=True).contiguous()
        if value.dtype == torch.bool:
            value = value.to(torch.int64)
        with self._metered("all_reduce", value.nbytes):
            dist.all_reduce(value, op=op, group=self.group)
        if average:
            if not (value.is_floating_point() or value.is_complex()):
                value = value.to(torch.get_default_dtype())
            value = value / self.size
        return value.to(tensor.device)

    def all_gather(self, tensor: Tensor, *, sync_grads: bool = False) -> Tensor:
        """The tensors of all ranks, stacked: (ranks, *tensor.shape), on ``tensor``'s device.

        Args:
            tensor: the same shape and dtype on every rank.
            sync_grads: let gradients flow back to every rank's tensor; a collective in backward too.
        """
        with self._metered("all_gather", tensor.nbytes * self.size):
            if sync_grads:
                gathered: Tensor = _AllGather.apply(tensor, self)  # type: ignore[no-untyped-call]
                return gathered
            return self.gather_tensor(tensor.detach())

    def gather_tensor(self, tensor: Tensor) -> Tensor:
        """:meth:`all_gather` without gradients, and without a record in the meter."""
        value = tensor.contiguous().to(self._device)
        gathered = torch.empty((self.size, *value.shape), dtype=value.dtype, device=self._device)
        dist.all_gather(list(gathered.unbind()), value, group=self.group)
        return gathered.to(tensor.device)

    def broadcast_object(self, obj: Any, src: int) -> Any:
        """``obj`` of the global rank ``src``, on every rank."""
        payload = pickle.dumps(obj) if dist.get_rank() == src else b""
        size = torch.tensor([len(payload)], device=self._device)
        with self._metered("broadcast", size.element_size(), sends=dist.get_rank() == src):
            dist.broadcast(size, src, group=self.group)
        data = torch.empty(int(size), dtype=torch.uint8)
        if dist.get_rank() == src:
            data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        data = data.to(self._device)
        with self._metered("broadcast", data.numel(), sends=dist.get_rank() == src):
            dist.broadcast(data, src, group=self.group)
        return obj if dist.get_rank() == src else pickle.loads(data.cpu().numpy().tobytes())

    def gather_objects(self, obj: Any) -> list[Any]:
        """``obj`` of every rank, in rank order, on every rank."""
        payload = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8).to(self._device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.size)]
        with self._metered("all_gather", 8 * self.size):
            dist.all_gather(sizes, torch.tensor([payload.numel()], device=self._device), group=self.group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: payload.numel()] = payload
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        with self._metered("all_gather", longest * self.size):
            dist.all_gather(parts, padded, group=self.group)
        return [
            pickle.loads(part[: int(size)].cpu().numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)
        ]

    def broadcast_tensors(self, tensors: list[Tensor], src: int) -> None:
        """Copies the tensors of the global rank ``src`` into every rank's, one message for each dtype and device."""

        def broadcast(flat: Tensor) -> None:
            moved = flat.to(self._device)
            with self._metered("broadcast", moved.nbytes, sends=dist.get_rank() == src):
                dist.broadcast(moved, src, group=self.group)
            flat.copy_(moved)

        for members in alike(tensor.detach() for tensor in tensors):
            apply_flat(broadcast, members)

    def barrier(self) -> None:
        """Returns when every rank of the group has called it."""
        with self._metered("barrier", 0):
            if self._device.type == "cuda":
                dist.barrier(group=self.group, device_ids=[self._device.index])
            else:
                dist.barrier(group=self.group)

    def _metered(self, operation: str, size_bytes: int, *, sends: bool = True) -> Any:
        return self._meter.blocking(
            operation,
            group=self._name,
            group_size=self.size,
            size_bytes=size_bytes,
            sent_bytes=None if sends else 0,
            ranks=self._ranks,
            on_stream=self._device.type == "cuda",
        )


class _AllGather(torch.autograd.Function):
    """Forward: (*shape) of each rank to (ranks, *shape) on every rank. Backward: this rank's row of the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: MeteredGroup) -> Tensor:
        ctx.group = group
        return group.gather_tensor(tensor)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        group: MeteredGroup = ctx.group
        return group.all_reduce(grad_outputs[0], "sum")[group.rank], None


def _reduction(reduction: Any) -> tuple[Any, bool]:
    if reduction is None:
        return dist.ReduceOp.SUM, False
    if isinstance(reduction, str):
        if reduction.lower() not in _REDUCTIONS:
            raise ValueError(f"reduce_op={reduction!r} is unknown; known: {', '.join(_REDUCTIONS)}")
        return _REDUCTIONS[reduction.lower()], reduction.lower() in ("mean", "avg")
    if reduction == dist.ReduceOp.AVG:
        return dist.ReduceOp.SUM, True  # gloo has no average
    return reduction, False
