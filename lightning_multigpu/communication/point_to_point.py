"""Metered messages between two ranks of a process group: tensors and Python objects."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.metering.records import Transfer

_FIRST_BYTES = 4096
"""Size of the first message of an object; most objects need no second message."""


class PointToPointGroup:
    """Point-to-point messages between the ranks of a process group; those between two ranks arrive in order.

    A rank's *position* is its index in ``process_group``. ``device`` is that of the back end's tensors, and ``name``
    the meter's name for the group.
    """

    def __init__(self, process_group: dist.ProcessGroup, meter: Meter, device: torch.device, *, name: str) -> None:
        self.process_group = process_group
        self.ranks = dist.get_process_group_ranks(process_group)
        self.device = device
        self._meter = meter
        self._name = name
        self._on_stream = device.type == "cuda"
        self._pending: list[tuple[dist.Work, Tensor]] = []

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    def begin(self, operation: str, size_bytes: int, **described: Any) -> Transfer:
        """Starts to meter a transfer; arguments as of :meth:`.Meter.begin`."""
        return self._meter.begin(
            operation,
            group=self._name,
            group_size=self.num_ranks,
            size_bytes=size_bytes,
            on_stream=self._on_stream,
            **described,
        )

    def send_object(self, obj: Any, position: int) -> None:
        """Sends a picklable object; returns at once."""
        payload = bytearray(pickle.dumps(obj))
        data = torch.frombuffer(bytearray(len(payload).to_bytes(8, "little")) + payload, dtype=torch.uint8)
        self.send(torch.nn.functional.pad(data[:_FIRST_BYTES], (0, max(0, _FIRST_BYTES - data.numel()))), position)
        if data.numel() > _FIRST_BYTES:
            self.send(data[_FIRST_BYTES:], position)

    def receive_object(self, position: int) -> Any:
        """Waits for the next object that the rank at ``position`` sends."""
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
        with self.begin("send", staged.nbytes):
            work = dist.isend(staged, self.ranks[position], group=self.process_group)
        assert work is not None
        self._pending = [(w, t) for w, t in self._pending if not w.is_completed()]
        self._pending.append((work, staged))

    def receive(self, tensor: Tensor, position: int) -> Tensor:
        """Waits for the next tensor that the rank at ``position`` sends, and fills ``tensor``, on any device."""
        staged = tensor if tensor.device == self.device else tensor.to(self.device)
        with self.begin("recv", staged.nbytes, blocking=True):
            dist.recv(staged, self.ranks[position], group=self.process_group)
        if staged is not tensor:
            tensor.copy_(staged)
        return tensor

    def finish(self) -> None:
        """Waits until everything has been sent."""
        pending, self._pending = self._pending, []
        if pending:
            with self.begin("send", 0, blocking=True):  # the bytes are counted already
                for work, _ in pending:
                    work.wait()

    def same_everywhere(self, number: int) -> bool:
        """Whether all ranks have the same number; a collective."""
        mine = torch.tensor([number], device=self.device)
        numbers = [torch.empty_like(mine) for _ in self.ranks]
        with self.begin("all_gather", 8 * len(numbers), blocking=True):
            dist.all_gather(numbers, mine, group=self.process_group)
        return len({int(value) for value in numbers}) == 1
