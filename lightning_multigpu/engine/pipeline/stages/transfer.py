"""What travels from one stage to the next beside a schedule's messages: headers, objects, and evaluation's outputs."""

from __future__ import annotations

import pickle
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.pipeline.stages.layer_interception import Carried

_FIRST_BYTES = 4096
"""Of an object that is sent, those in the first message; most objects need no second one."""


@dataclass(frozen=True)
class Header:
    """What a receiver must know before the tensors come: the containers, and of each tensor shape, dtype, gradient."""

    structure: Any
    tensors: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]

    @classmethod
    def of(cls, carried: Carried) -> Header:
        tensors = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in carried.tensors)
        return cls(carried.structure, tensors)

    def describes(self, carried: Carried) -> bool:
        """Whether these are such containers and such tensors."""
        return (
            len(self.tensors) == len(carried.tensors)
            and all(
                tensor.shape == shape and tensor.dtype == dtype and tensor.requires_grad == requires_grad
                for tensor, (shape, dtype, requires_grad) in zip(carried.tensors, self.tensors, strict=True)
            )
            and self.structure == carried.structure
        )


class PipelineGroup:
    """Point-to-point messages between the ranks of one pipeline; those between two ranks arrive in order.

    A rank's *position* is that of its first stage: position p of P has the stages p, P + p, 2P + p...

    Args:
        group: the ranks, in the order of their positions.
        meter: told of every message, as group "pipeline".
        device: where the back end wants its tensors.
        in_batches: two ranks that send to each other have to post both messages in one batch, which torch's schedules
            do; by default they need not where the back end sends from the host's memory.
    """

    def __init__(
        self, group: dist.ProcessGroup, meter: Meter, device: torch.device, *, in_batches: bool | None = None
    ) -> None:
        self.in_batches = device.type != "cpu" if in_batches is None else in_batches
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.device = device
        self._meter = meter
        self._pending: list[tuple[dist.Work, Tensor]] = []

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    def send_object(self, obj: Any, position: int) -> None:
        """Sends a picklable object; returns at once."""
        payload = bytearray(pickle.dumps(obj))
        data = torch.frombuffer(bytearray(len(payload).to_bytes(8, "little")) + payload, dtype=torch.uint8)
        self.send(torch.nn.functional.pad(data[:_FIRST_BYTES], (0, max(0, _FIRST_BYTES - data.numel()))), position)
        if data.numel() > _FIRST_BYTES:
            self.send(data[_FIRST_BYTES:], position)

    def receive_object(self, position: int) -> Any:
        """The object that the rank at ``position`` has sent next; waits for it."""
        first = self.receive(torch.empty(_FIRST_BYTES, dtype=torch.uint8), position).numpy().tobytes()
        size = int.from_bytes(first[:8], "little")
        payload = first[8 : 8 + size]
        if size > len(payload):
            rest = self.receive(torch.empty(size - len(payload), dtype=torch.uint8), position)
            payload += rest.numpy().tobytes()
        return pickle.loads(payload)

    def send(self, tensor: Tensor, position: int) -> None:
        """Sends a tensor of any device; returns at once."""
        staged = tensor.detach().to(self.device).contiguous()
        transfer = self._meter.begin(
            "send", group="pipeline", group_size=self.num_ranks, size_bytes=staged.numel() * staged.element_size()
        )
        work = dist.isend(staged, self.ranks[position], group=self.group)
        assert work is not None
        transfer.finish()
        self._pending = [(w, t) for w, t in self._pending if not w.is_completed()]
        self._pending.append((work, staged))

    def receive(self, tensor: Tensor, position: int) -> Tensor:
        """Fills ``tensor``, on its own device, with what the rank at ``position`` has sent next; waits for it."""
        staged = tensor if tensor.device == self.device else tensor.to(self.device)
        size_bytes = staged.numel() * staged.element_size()
        with self._meter.blocking("recv", group="pipeline", group_size=self.num_ranks, size_bytes=size_bytes):
            dist.recv(staged, self.ranks[position], group=self.group)
        if staged is not tensor:
            tensor.copy_(staged)
        return tensor

    def send_carried(self, carried: Carried, position: int) -> None:
        """Sends a layer's output with its header; returns at once."""
        self.send_object(Header.of(carried), position)
        for tensor in carried.tensors:
            self.send(tensor, position)

    def receive_carried(self, position: int, device: torch.device, *, gradients: bool = False) -> Carried:
        """A layer's output that the rank at ``position`` has sent, on ``device``.

        With ``gradients`` the tensors require a gradient if the sender's did.
        """
        header = self.receive_object(position)
        empty = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, _ in header.tensors]
        tensors = tuple(self.receive(tensor, position) for tensor in empty)
        if gradients:
            for tensor, (_, _, requires_grad) in zip(tensors, header.tensors, strict=True):
                tensor.requires_grad_(requires_grad)
        return Carried(header.structure, tensors)

    def from_last(self, obj: Any) -> Any:
        """``obj`` of the last stage's rank, on every rank; picklable. A collective of the pipeline.

        The last stage does not wait until it has been received; :meth:`finish` does.
        """
        last = self.num_ranks - 1
        if dist.get_rank(self.group) != last:
            return self.receive_object(last)
        for position in range(last):
            self.send_object(obj, position)
        return obj

    def finish(self) -> None:
        """Waits until everything has been sent."""
        pending, self._pending = self._pending, []
        if pending:
            with self.waiting_for_sends():
                for work, _ in pending:
                    work.wait()

    def waiting_for_sends(self) -> AbstractContextManager[None]:
        """Within the block this rank waits until others have received what it has sent, whose bytes are counted."""
        return self._meter.blocking("send", group="pipeline", group_size=self.num_ranks, size_bytes=0)

    def same_everywhere(self, number: int) -> bool:
        """Whether all ranks have the same number; a collective of the pipeline."""
        mine = torch.tensor([number], device=self.device)
        numbers = [torch.empty_like(mine) for _ in self.ranks]
        with self._meter.blocking(
            "all_gather", group="pipeline", group_size=self.num_ranks, size_bytes=8 * len(numbers)
        ):
            dist.all_gather(numbers, mine, group=self.group)
        return len({int(value) for value in numbers}) == 1
