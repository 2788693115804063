"""One stage of a pipeline: its passes over micro-batches, and the messages that they need and give.

The shapes of each kind of micro-batch are learned from a header that travels ahead of its first tensors, so that
micro-batches of different sizes and a smaller last batch need nothing further.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import Parameter

from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.pipeline.measuring.recorder import Recorder
from lightning_multigpu.engine.pipeline.stages.layer_interception import Carried
from lightning_multigpu.engine.pipeline.stages.stage_messages import Header, Message, PipelineGroup, messages_over

Gradients = tuple[Tensor | None, ...]


def backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], received: Sequence[Tensor]) -> Gradients:
    """Adds to the parameters' gradients; gives those of what was received.

    Args:
        outputs: of the stage, all of which need a gradient.
        gradients: of the outputs; None for a loss.
        received: leaves that the outputs were computed from, or not.
    """
    torch.autograd.backward(outputs, gradients)
    return _taken(received)


def backward_in_parts(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    received: Sequence[Tensor],
    parameters: Sequence[Parameter],
) -> tuple[Gradients, Callable[[], None]]:
    """The gradients of what was received, and what adds to the parameters' gradients when it is called.

    Right only where :func:`divisible`. The outputs are detached in place.
    """
    given: Any = None if all(gradient is None for gradient in gradients) else gradients
    try:
        _, parts = stage_backward_input(list(outputs), given, list(received), iter(parameters))
    except RuntimeError as error:  # torch's words around what was raised
        raise error.__cause__ or error from None
    return _taken(received), lambda: _finish(parameters, parts)


def divisible(outputs: Iterable[Tensor], received: Iterable[Tensor]) -> bool:
    """Whether each output was computed from something received that needs a gradient.

    torch looks for parameters behind what was received, and would lose those of any other output.
    """
    wanted = {id(tensor) for tensor in received if tensor.requires_grad}
    return all(any(id(leaf) in wanted for leaf in _leaves(output)) for output in outputs)


def _finish(parameters: Sequence[Parameter], parts: Any) -> None:
    stage_backward_weight(iter(parameters), parts)


def _taken(received: Sequence[Tensor]) -> Gradients:
    gradients = tuple(tensor.grad for tensor in received)
    for tensor in received:
        tensor.grad = None
    return gradients


def _leaves(output: Tensor) -> Iterable[Tensor]:
    """The tensors that the gradients of the output are accumulated in."""
    if output.grad_fn is None:
        yield output
        return
    nodes: list[Any] = [output.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


class Stage:
    """A stage whose inputs and outputs may have another shape in every micro-batch.

    Between :meth:`begin` and :meth:`end` a schedule calls, for each pass, :meth:`expect` and the method of the pass.
    Where the stage does not post its messages itself, the schedule posts what :meth:`expect` returns and waits for it
    before the pass, and posts what :meth:`outgoing` returns after it.

    Args:
        run: computes a micro-batch, by its number in the schedule: gives the output, on the last stage the loss.
        parameters: those that the stage's rank holds.
        index: of the stage.
        num_stages: of the pipeline.
        line: to the other ranks.
        device: where the stage computes.
        meter: told of activations and gradients, as group "pipeline".
        recorder: told of what the stage does.
    """

    def __init__(
        self,
        run: Callable[[int], Carried | Tensor],
        parameters: Callable[[], list[Parameter]],
        index: int,
        num_stages: int,
        line: PipelineGroup,
        device: torch.device,
        meter: Meter,
        recorder: Recorder,
    ) -> None:
        self.index = index
        self.num_stages = num_stages
        self.device = device
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self._run = run
        self._parameters = parameters
        self._line = line
        self._messages = messages_over(line, meter, num_stages)
        self._recorder = recorder
        self._before = (index - 1) % line.num_ranks
        self._behind = (index + 1) % line.num_ranks
        self._keys: list[Any] = []
        self._alternates = False
        self._headers_in: dict[Any, Header] = {}
        self._headers_out: dict[Any, Header] = {}
        self._divisible: dict[Any, bool] = {}
        self._received: dict[int, tuple[Tensor, ...]] = {}
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self._gradients: dict[int, Gradients] = {}
        self._outgoing: dict[Message, list[dist.P2POp]] = {}
        self._weight_parts: dict[int, Callable[[], None]] = {}

    def begin(self, keys: list[Any], *, alternates: bool) -> None:
        """Starts a step.

        Args:
            keys: tell the kinds of its micro-batches apart: equal keys, equal shapes.
            alternates: the schedule is 1F1B.
        """
        self._keys = keys
        self._alternates = alternates
        self.drop()

    def drop(self) -> None:
        """Lets go of all micro-batches."""
        for kept in (self._received, self._outputs, self._gradients, self._outgoing, self._weight_parts):
            kept.clear()

    def end(self) -> None:
        """Waits until all messages of a step have been sent."""
        self._messages.finish()
        self._line.finish()

    def expected(self, micro_batch: int) -> Carried:
        """What the stage before hands on, in tensors on the stage's device whose values may still be missing."""
        structure = self._headers_in[self._keys[micro_batch]].structure
        return Carried(structure, tuple(self._on_device(tensor) for tensor in self._received[micro_batch]))

    def arrived(self, micro_batch: int) -> tuple[Tensor, ...]:
        """The tensors of the stage before, with their values; waits for them."""
        header = self._headers_in[self._keys[micro_batch]]
        self._wait("forward", Message("forward", self.index - 1, micro_batch))
        tensors = tuple(tensor.to(self.device) for tensor in self._received[micro_batch])
        for tensor, (_, _, requires_grad) in zip(tensors, header.tensors, strict=True):
            tensor.requires_grad_(requires_grad)
        self._received[micro_batch] = tensors
        return tensors

    # What schedules call

    def expect(self, kind: str, micro_batch: int, *, ahead: bool = False) -> list[dist.P2POp]:
        """Begins to receive what a pass needs, if that has not begun.

        With ``ahead`` it is begun only if its shapes are known by now.
        """
        if kind == "forward" and not self.is_first and micro_batch not in self._received:
            known = self._keys[micro_batch] in self._headers_in
            return self._receive_input(micro_batch) if known or not ahead else []
        if kind == "backward" and not self.is_last and micro_batch not in self._gradients:
            outputs = self._outputs.get(micro_batch, ()) if ahead else self._outputs[micro_batch]
            return self._receive_gradients(micro_batch) if any(output.requires_grad for output in outputs) else []
        return []

    def outgoing(self, kind: Literal["forward", "backward"], micro_batch: int) -> list[dist.P2POp]:
        """What a pass has left to be posted."""
        operations = self._outgoing.pop(Message(kind, self.index, micro_batch), [])
        if operations:
            self._recorder.enter("send", self.index, micro_batch)
        return operations

    def forward(self, micro_batch: int) -> Carried | Tensor:
        """The forward pass: the output, on the last stage the loss."""
        self._begin_pass("forward", micro_batch, received=not self.is_first)
        output = self._run(micro_batch)
        if isinstance(output, Tensor):
            self._outputs[micro_batch] = (output,)
        else:
            self._outputs[micro_batch] = output.tensors
            self._send_output(micro_batch, output)
        if self._alternates:  # the stage before has sent this after it had received the gradient of so many earlier
            self._messages.taken(Message("backward", self.index, micro_batch - (self.num_stages - self.index) - 1))
        self._recorder.enter("idle", self.index, micro_batch)
        return output

    def backward(self, micro_batch: int, *, full: bool) -> None:
        """The backward pass, if a gradient is wanted; without ``full`` the parameters' are left to :meth:`weight`."""
        outputs, received = self._outputs.pop(micro_batch), self._received.pop(micro_batch, ())
        wanted = [number for number, output in enumerate(outputs) if output.requires_grad]
        computed: Gradients = (None,) * len(received)
        if wanted:
            self._begin_pass("backward", micro_batch, received=not self.is_last)
            gradients: Gradients = (None,) * len(outputs) if self.is_last else self._arrived_gradients(micro_batch)
            roots, given = [outputs[number] for number in wanted], [gradients[number] for number in wanted]
            computed = self._compute_gradients(micro_batch, roots, given, received, full=full)
        if not self.is_first:
            self._send_gradients(micro_batch, received, computed)
        self._recorder.enter("idle", self.index, micro_batch)

    def weight(self, micro_batch: int) -> None:
        """The part of the backward pass that nobody waits for."""
        compute = self._weight_parts.pop(micro_batch, None)
        if compute is not None:
            self._begin_pass("weight", micro_batch, received=False)
            compute()
            self._recorder.enter("idle", self.index, micro_batch)

    # Forward

    def _receive_input(self, micro_batch: int) -> list[dist.P2POp]:
        self._before_scheduled_wait(micro_batch)
        key = self._keys[micro_batch]
        if key not in self._headers_in:
            self._headers_in[key] = self._line.receive_object(self._before)
        self._received[micro_batch] = tuple(
            torch.empty(shape, dtype=dtype, device=self._line.device)
            for shape, dtype, _ in self._headers_in[key].tensors
        )
        message = Message("forward", self.index - 1, micro_batch)
        return self._messages.receive(message, self._received[micro_batch], self._before)

    def _send_output(self, micro_batch: int, output: Carried) -> None:
        key = self._keys[micro_batch]
        header = self._headers_out.get(key)
        if header is None:
            header = self._headers_out[key] = Header.of(output)
            self._line.send_object(header, self._behind)
        elif not header.describes(output):
            raise ValueError(
                f"stage {self.index} hands on {Header.of(output).tensors}, and for an earlier micro-batch of the same "
                f"shapes {header.tensors}: shapes that depend on values cannot be pipelined"
            )
        tensors = [tensor.detach().contiguous() for tensor in output.tensors]
        self._send(Message("forward", self.index, micro_batch), tensors, self._behind)

    # Backward

    def _receive_gradients(self, micro_batch: int) -> list[dist.P2POp]:
        self._before_scheduled_wait(micro_batch)
        gradients = tuple(
            torch.empty(output.shape, dtype=output.dtype, device=self._line.device) if output.requires_grad else None
            for output in self._outputs[micro_batch]
        )
        self._gradients[micro_batch] = gradients
        message = Message("backward", self.index + 1, micro_batch)
        return self._messages.receive(message, [g for g in gradients if g is not None], self._behind)

    def _arrived_gradients(self, micro_batch: int) -> Gradients:
        self._wait("backward", Message("backward", self.index + 1, micro_batch))
        self._messages.taken(Message("forward", self.index, micro_batch))
        return tuple(None if g is None else g.to(self.device) for g in self._gradients.pop(micro_batch))

    def _compute_gradients(
        self,
        micro_batch: int,
        outputs: list[Tensor],
        gradients: list[Tensor | None],
        received: tuple[Tensor, ...],
        *,
        full: bool,
    ) -> Gradients:
        if full:
            return backward(outputs, gradients, received)
        if not any(tensor.requires_grad for tensor in received):  # nobody waits for a gradient
            self._weight_parts[micro_batch] = lambda: torch.autograd.backward(outputs, gradients)
            return (None,) * len(received)
        key = self._keys[micro_batch]
        if key not in self._divisible:
            self._divisible[key] = divisible(outputs, received)
        if not self._divisible[key]:
            return backward(outputs, gradients, received)
        computed, self._weight_parts[micro_batch] = backward_in_parts(outputs, gradients, received, self._parameters())
        return computed

    def _send_gradients(self, micro_batch: int, received: Sequence[Tensor], computed: Gradients) -> None:
        # A tensor that a layer hands on as it got it is detached by now, and no longer says that it needs a gradient.
        header = self._headers_in[self._keys[micro_batch]]
        gradients = [
            torch.zeros_like(tensor) if gradient is None else gradient.contiguous()
            for tensor, gradient, (_, _, requires_grad) in zip(received, computed, header.tensors, strict=True)
            if requires_grad
        ]
        self._send(Message("backward", self.index, micro_batch), gradients, self._before)

    # Both

    def _begin_pass(self, kind: str, micro_batch: int, *, received: bool) -> None:
        self._messages.settle()
        waited = received and not self._messages.posted_by_stage
        self._recorder.enter(kind, self.index, micro_batch, received=waited)

    def _before_scheduled_wait(self, micro_batch: int) -> None:
        if not self._messages.posted_by_stage:
            self._recorder.enter("receive", self.index, micro_batch)

    def _wait(self, kind: str, message: Message) -> None:
        """In the middle of a pass."""
        if self._messages.posted_by_stage:
            self._recorder.enter("receive", self.index, message.micro_batch)
            self._messages.arrived(message)
            self._recorder.enter(kind, self.index, message.micro_batch)

    def _send(self, message: Message, tensors: Sequence[Tensor], position: int) -> None:
        self._recorder.enter("send", self.index, message.micro_batch)
        operations = self._messages.send(message, [tensor.to(self._line.device) for tensor in tensors], position)
        if operations:
            self._outgoing[message] = operations

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device == self.device else torch.empty_like(tensor, device=self.device)
