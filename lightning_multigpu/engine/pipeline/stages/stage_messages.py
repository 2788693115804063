"""Activations and gradients on their way between stages.

torch's schedules post messages themselves, in batches of sends and receives, so that over NCCL two ranks that send to
each other do not both wait. Gloo needs nothing of that: a message goes out as soon as it has been computed, a receive
is posted a pass ahead, and a rank waits only for what it is about to use::

    over NCCL    forward 1, [send 1, receive gradient 0: wait for both], backward 0
    over Gloo    receive gradient 0, forward 1, send 1, backward 0: wait for gradient 0
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.metering.records import Transfer
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


class Message(NamedTuple):
    """What a message is about, the same for sender and receiver.

    Attributes:
        kind: "forward" for activations, "backward" for gradients.
        stage: that computed them.
        micro_batch: by its number in the schedule.
    """

    kind: Literal["forward", "backward"]
    stage: int
    micro_batch: int


class Messages(Protocol):
    """One stage's messages.

    Attributes:
        posted_by_stage: :meth:`receive` and :meth:`send` post, and :meth:`arrived` waits; otherwise the schedule does.
    """

    posted_by_stage: bool

    def receive(self, message: Message, buffers: Sequence[Tensor], position: int) -> list[dist.P2POp]:
        """Begins to receive from the rank at ``position``; returns what the schedule has to post for that."""

    def arrived(self, message: Message) -> None:
        """Waits until the buffers are filled."""

    def send(self, message: Message, tensors: Sequence[Tensor], position: int) -> list[dist.P2POp]:
        """Begins to send; returns what the schedule has to post for that."""

    def taken(self, message: Message) -> None:
        """The receiver is known to have it: the tensors can be let go of."""

    def settle(self) -> None:
        """The schedule has waited for all receives that it has posted."""

    def finish(self) -> None:
        """Waits until everything has been sent."""


class HostMessages:
    """Over a back end that sends from the host's memory, such as Gloo; messages are told apart by their tags.

    Args:
        line: to the other ranks.
        meter: told of sends, and of receives while the rank waits for them, as group "pipeline".
        num_stages: of the pipeline.
    """

    posted_by_stage = True

    def __init__(self, line: PipelineGroup, meter: Meter, num_stages: int) -> None:
        self._line = line
        self._group = line.group
        self._num_ranks = line.num_ranks
        self._meter = meter
        self._num_stages = num_stages
        self._expected: dict[Message, tuple[list[dist.Work], int]] = {}
        self._under_way: dict[Message, list[tuple[dist.Work, Tensor]]] = {}

    def receive(self, message: Message, buffers: Sequence[Tensor], position: int) -> list[dist.P2POp]:
        tag = self._tag(message)
        works = [self._group.recv([buffer], position, tag) for buffer in buffers]
        self._expected[message] = works, _size_bytes(buffers)
        return []

    def arrived(self, message: Message) -> None:
        works, size_bytes = self._expected.pop(message)
        transfer = self._meter.begin(
            "recv", group="pipeline", group_size=self._num_ranks, size_bytes=size_bytes, sent_bytes=0, blocking=True
        )
        try:
            for work in works:
                work.wait()
        except BaseException:
            transfer.broke()
            raise
        transfer.finish()

    def send(self, message: Message, tensors: Sequence[Tensor], position: int) -> list[dist.P2POp]:
        tag, size_bytes = self._tag(message), _size_bytes(tensors)
        transfer = self._meter.begin(
            "send", group="pipeline", group_size=self._num_ranks, size_bytes=size_bytes, sent_bytes=size_bytes,
            noted=False,
        )  # fmt: skip
        self._under_way[message] = [(self._group.send([tensor], position, tag), tensor) for tensor in tensors]
        transfer.finish()
        return []

    def taken(self, message: Message) -> None:
        for work, _ in self._under_way.pop(message, ()):
            work.wait()

    def settle(self) -> None:
        """Nothing: a schedule posts no receives of its own."""

    def finish(self) -> None:
        if self._under_way:
            with self._line.waiting_for_sends():
                for message in list(self._under_way):
                    self.taken(message)

    def _tag(self, message: Message) -> int:
        """Not 0, which headers and other objects have."""
        number = message.micro_batch * self._num_stages + message.stage
        return 1 + 2 * number + (message.kind == "backward")


class ScheduledMessages:
    """Posted and waited for by torch's schedules, as NCCL needs it.

    Args:
        line: to the other ranks.
        meter: told of sends and receives as group "pipeline".
    """

    posted_by_stage = False

    def __init__(self, line: PipelineGroup, meter: Meter) -> None:
        self._line = line
        self._meter = meter
        self._transfers: list[Transfer] = []

    def receive(self, message: Message, buffers: Sequence[Tensor], position: int) -> list[dist.P2POp]:
        return self._operations(dist.irecv, "recv", buffers, position, awaited=True)

    def arrived(self, message: Message) -> None: ...

    def send(self, message: Message, tensors: Sequence[Tensor], position: int) -> list[dist.P2POp]:
        return self._operations(dist.isend, "send", tensors, position, awaited=False)

    def taken(self, message: Message) -> None: ...

    def settle(self) -> None:
        for transfer in self._transfers:
            transfer.finish()
        self._transfers.clear()

    def finish(self) -> None:
        self.settle()

    def _operations(
        self, operation: object, name: str, tensors: Sequence[Tensor], position: int, *, awaited: bool
    ) -> list[dist.P2POp]:
        for tensor in tensors:
            self._transfers.append(
                self._meter.begin(
                    name,
                    group="pipeline",
                    group_size=self._line.num_ranks,
                    size_bytes=_size_bytes([tensor]),
                    blocking=awaited,
                    awaited=awaited,
                )
            )
        rank = self._line.ranks[position]
        return [dist.P2POp(operation, tensor, rank, self._line.group) for tensor in tensors]  # type: ignore[arg-type]


def messages_over(line: PipelineGroup, meter: Meter, num_stages: int) -> Messages:
    """Those that suit the line's back end."""
    return ScheduledMessages(line, meter) if line.in_batches else HostMessages(line, meter, num_stages)


def _size_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
