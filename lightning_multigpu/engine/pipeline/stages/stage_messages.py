"""Activations and gradients on their way between stages.

torch's schedules post messages themselves, in batches of sends and receives, so that over NCCL two ranks that send to
each other do not both wait. Gloo needs nothing of that: a message goes out as soon as it has been computed, a receive
is posted a pass ahead, and a rank waits only for what it is about to use::

    over NCCL    forward 1, [send 1, receive gradient 0: wait for both], backward 0
    over Gloo    receive gradient 0, forward 1, send 1, backward 0: wait for gradient 0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.metering.records import Transfer
from lightning_multigpu.engine.pipeline.stages.transfer import PipelineGroup


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
