"""Messages between the stages of a pipeline: activations, gradients, headers and objects.

torch's schedules post messages themselves, in batches of sends and receives, so that over NCCL two ranks that send to
each other do not both wait. Over Gloo the stages post them: a message is sent as soon as it is computed, a receive is
posted one pass ahead, and a rank waits only for the message that it uses next::

    over NCCL    forward 1, [send 1, receive gradient 0: wait for both], backward 0
    over Gloo    receive gradient 0, forward 1, send 1, backward 0: wait for gradient 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.metering.records import Transfer
from lightning_multigpu.communication.point_to_point import PointToPointGroup
from lightning_multigpu.engine.pipeline.measuring.recorder import Recorder
from lightning_multigpu.engine.pipeline.stages.layer_interception import Activations


@dataclass(frozen=True)
class Header:
    """The containers of activations, and the shape, dtype and requires_grad of each tensor; sent ahead of them."""

    structure: Any
    tensors: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]

    @classmethod
    def of(cls, activations: Activations) -> Header:
        tensors = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in activations.tensors)
        return cls(activations.structure, tensors)

    def empty(self, device: torch.device) -> tuple[Tensor, ...]:
        """Memory for the tensors."""
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, _ in self.tensors)

    def require_gradients(self, tensors: Sequence[Tensor]) -> None:
        """Makes the received tensors require a gradient where the sent ones do."""
        for tensor, (_, _, requires_grad) in zip(tensors, self.tensors, strict=True):
            tensor.requires_grad_(requires_grad)


class PipelineGroup(PointToPointGroup):
    """Point-to-point messages between the ranks of one pipeline.

    A rank's *position* is that of its first stage: position p of P has the stages p, P + p, 2P + p...

    Args:
        in_batches: two ranks that send to each other have to post both messages in one batch, as torch's schedules do;
            by default True unless the back end sends from the host's memory.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        meter: Meter,
        device: torch.device,
        *,
        in_batches: bool | None = None,
    ) -> None:
        super().__init__(process_group, meter, device, name="pipeline")
        self.in_batches = device.type != "cpu" if in_batches is None else in_batches
        self.sending: list[Transfer] = []  # until the next pass begins: the rank does not know when they really end
        self._idle_since: Any = None

    def pass_ends(self) -> None:
        """From here on the rank, or its stream, can only wait for messages, until :meth:`pass_begins`."""
        if self._idle_since is None:
            self._idle_since = self._meter.mark(on_stream=self._on_stream)

    def pass_begins(self) -> None:
        """Ends the wait since the last pass; messages sent after that pass count as sent."""
        for transfer in self.sending:
            transfer.finish()
        self.sending.clear()
        since, self._idle_since = self._idle_since, None
        if since is not None:
            self._meter.waited(since)

    def send_activations(self, activations: Activations, position: int) -> None:
        """Sends a layer's output with its header; returns at once."""
        self.send_object(Header.of(activations), position)
        for tensor in activations.tensors:
            self.send(tensor, position)

    def receive_activations(self, position: int, device: torch.device, *, gradients: bool = False) -> Activations:
        """Waits for the layer's output that the rank at ``position`` sends, and puts it on ``device``.

        With ``gradients`` the tensors require a gradient if the sent ones do.
        """
        header: Header = self.receive_object(position)
        tensors = tuple(self.receive(tensor, position) for tensor in header.empty(device))
        if gradients:
            header.require_gradients(tensors)
        return Activations(header.structure, tensors)

    def from_last(self, obj: Any) -> Any:
        """``obj`` of the last stage's rank, on every rank; picklable. A collective of the pipeline.

        The last stage does not wait until the others have received it; :meth:`finish` does.
        """
        last = self.num_ranks - 1
        if dist.get_rank(self.process_group) != last:
            return self.receive_object(last)
        for position in range(last):
            self.send_object(obj, position)
        return obj


class Message(NamedTuple):
    """The identity of a message, the same for sender and receiver.

    Attributes:
        kind: "forward" for activations, "backward" for gradients.
        stage: the stage that computed them.
        micro_batch: the micro-batch's number in the schedule.
    """

    kind: Literal["forward", "backward"]
    stage: int
    micro_batch: int


class HostMessages:
    """One stage's messages over a back end that sends from the host's memory, such as Gloo; each has a tag of its own.

    The stage posts its messages and waits for them.
    """

    def __init__(self, group: PipelineGroup, recorder: Recorder, stage: int, num_stages: int) -> None:
        self._group, self._recorder = group, recorder
        self._stage, self._num_stages = stage, num_stages
        self._expected: dict[Message, tuple[list[dist.Work], int]] = {}
        self._under_way: dict[Message, list[tuple[dist.Work, Tensor]]] = {}

    def receive(self, message: Message, buffers: Sequence[Tensor], position: int) -> list[dist.P2POp]:
        """Begins to receive from the rank at ``position``; returns the operations that the schedule has to post."""
        tag = self._tag(message)
        works = [self._group.process_group.recv([buffer], position, tag) for buffer in buffers]
        self._expected[message] = works, sum(buffer.nbytes for buffer in buffers)
        return []

    def arrived(self, kind: str, message: Message) -> None:
        """Waits until the buffers are filled, in the middle of a pass of this kind."""
        self._recorder.enter("receive", self._stage, message.micro_batch)
        works, size_bytes = self._expected.pop(message)
        with self._group.begin("recv", size_bytes, blocking=True):
            for work in works:
                work.wait()
        self._recorder.enter(kind, self._stage, message.micro_batch)

    def send(self, message: Message, tensors: Sequence[Tensor], position: int) -> None:
        """Begins to send."""
        self._recorder.enter("send", self._stage, message.micro_batch)
        tag, group = self._tag(message), self._group
        staged = [tensor.to(group.device) for tensor in tensors]
        with group.begin("send", sum(tensor.nbytes for tensor in staged), noted=False):
            self._under_way[message] = [(group.process_group.send([each], position, tag), each) for each in staged]

    def outgoing(self, message: Message) -> list[dist.P2POp]:
        """The operations of a sent message that the schedule has to post."""
        return []

    def taken(self, message: Message) -> None:
        """Frees the tensors of a message that the receiver is known to have received."""
        for work, _ in self._under_way.pop(message, ()):
            work.wait()

    def pass_begins(self, kind: str, micro_batch: int, needed: Message | None) -> None:
        """Called when the schedule has waited for the message that a pass needs; here the stage waits for it."""
        self._recorder.enter(kind, self._stage, micro_batch)

    def pass_ends(self, micro_batch: int) -> None:
        """Called when a pass has ended, and has given its messages to :meth:`send`."""
        self._recorder.enter("idle", self._stage, micro_batch)

    def finish(self) -> None:
        """Waits until everything has been sent."""
        if self._under_way:
            with self._group.begin("send", 0, blocking=True):  # the bytes are counted already
                for message in list(self._under_way):
                    self.taken(message)

    def _tag(self, message: Message) -> int:
        """A tag from 1 on; headers and other objects have tag 0."""
        number = message.micro_batch * self._num_stages + message.stage
        return 1 + 2 * number + (message.kind == "backward")


class ScheduledMessages:
    """One stage's messages, posted and awaited by torch's schedules, as NCCL needs.

    It has the methods of :class:`HostMessages`. On a GPU the stream waits, and not the host::

        compute stream  [-- forward 1 --]........................[-- backward 0 --]
        posted by torch                 send 1, receive gradient 0
        metered                         [---- exposed -----------]

    A receive lasts from its posting to the pass that needs it, and is hidden while other passes run. A send lasts until
    the next pass begins: its real end is unknown, since torch keeps the handle.
    """

    def __init__(self, group: PipelineGroup, recorder: Recorder, stage: int, num_stages: int) -> None:
        self._group, self._recorder, self._stage = group, recorder, stage
        self._expected: dict[Message, list[Transfer]] = {}
        self._outgoing: dict[Message, list[dist.P2POp]] = {}

    def receive(self, message: Message, buffers: Sequence[Tensor], position: int) -> list[dist.P2POp]:
        self._recorder.enter("receive", self._stage, message.micro_batch)
        self._group.pass_ends()  # before the first pass of a step
        self._expected[message] = [self._group.begin("recv", buffer.nbytes) for buffer in buffers]
        return self._operations(dist.irecv, buffers, position)

    def arrived(self, kind: str, message: Message) -> None: ...

    def send(self, message: Message, tensors: Sequence[Tensor], position: int) -> None:
        self._recorder.enter("send", self._stage, message.micro_batch)
        for tensor in tensors:
            self._group.sending.append(self._group.begin("send", tensor.nbytes, awaited=False))
        self._outgoing[message] = self._operations(dist.isend, tensors, position)

    def outgoing(self, message: Message) -> list[dist.P2POp]:
        operations = self._outgoing.pop(message, [])
        if operations:
            self._recorder.enter("send", self._stage, message.micro_batch)
        return operations

    def taken(self, message: Message) -> None: ...

    def pass_begins(self, kind: str, micro_batch: int, needed: Message | None) -> None:
        for transfer in () if needed is None else self._expected.pop(needed, ()):
            transfer.finish()
        self._group.pass_begins()
        self._recorder.enter(kind, self._stage, micro_batch, received=needed is not None)

    def pass_ends(self, micro_batch: int) -> None:
        self._group.pass_ends()
        self._recorder.enter("idle", self._stage, micro_batch)

    def finish(self) -> None:
        self._group.pass_begins()

    def _operations(self, operation: Any, tensors: Sequence[Tensor], position: int) -> list[dist.P2POp]:
        rank, device = self._group.ranks[position], self._group.device
        return [dist.P2POp(operation, tensor.to(device), rank, self._group.process_group) for tensor in tensors]
