"""Stage: the passes of one stage over micro-batches, and the messages that they need and produce.

A header with the shapes travels ahead of the first tensors of each kind of micro-batch, so micro-batches may have
different sizes, and a last batch may be smaller.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    get_param_groups,
    reverse_closure,
)
from torch.nn import Parameter

from lightning_multigpu.engine.activation_checkpointing import works_in_place
from lightning_multigpu.engine.pipeline.measuring.recorder import Recorder
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.pipeline.stages.layer_interception import Activations
from lightning_multigpu.engine.pipeline.stages.stage_messages import (
    Header,
    HostMessages,
    Message,
    ScheduledMessages,
)

Gradients = tuple[Tensor | None, ...]

_NO_PATH = "one of its outputs depends on none of its inputs"
_INDIVISIBLE = ("CompiledFunctionBackward", "CheckpointFunctionBackward")


class Stage:
    """A stage whose inputs and outputs may have another shape in every micro-batch.

    Between :meth:`begin` and :meth:`end` a schedule calls, for each pass, :meth:`expect` and the method of the pass.
    If the stage does not post its messages itself, the schedule posts what :meth:`expect` returns and waits for it
    before the pass, and posts what :meth:`outgoing` returns after it.

    Args:
        run: called as ``run(stage, number)`` in a forward pass, with the micro-batch's number in the schedule. Runs the
            part of the user's step that this stage computes, on the tensors of :meth:`expected` and :meth:`arrived`,
            and returns the output, on the last stage the loss.

    Attributes:
        needs_input: some output of the step depends on a tensor that the stage before has sent.
    """

    def __init__(
        self,
        run: Callable[[Stage, int], Activations | Tensor],
        ownership: Ownership,
        index: int,
        recorder: Recorder,
    ) -> None:
        self.index = index
        self.num_stages = num_stages = len(ownership.bounds)
        self.device = ownership.device
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self._run = run
        start, _ = ownership.bounds[index]
        # An operation in place must not overwrite a received tensor: its gradient is needed.
        self._clones_input = index > 0 and works_in_place(ownership.chain.layers[start])
        self._parameters = ownership.held
        self._group = group = ownership.group
        self._messages: ScheduledMessages | HostMessages = (ScheduledMessages if group.in_batches else HostMessages)(
            group, recorder, index, num_stages
        )
        self._previous, self._following = ownership.previous, ownership.following
        self.needs_input = False
        self._keys: list[Any] = []
        self._alternates = False
        self._headers_in: dict[Any, Header] = {}
        self._headers_out: dict[Any, Header] = {}
        self._divisible: dict[Any, bool] = {}
        self._undivided_is_said = False
        self._received: dict[int, tuple[Tensor, ...]] = {}
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self._gradients: dict[int, Gradients] = {}
        self._weight_parts: dict[int, Callable[[], None]] = {}

    def begin(self, keys: list[Any], *, alternates: bool) -> None:
        """Starts a step of a micro-batch for each key; those with equal keys have equal shapes."""
        self.needs_input = False
        self._keys = keys
        self._alternates = alternates
        self.drop()

    def drop(self) -> None:
        """Frees everything kept for micro-batches."""
        for kept in (self._received, self._outputs, self._gradients, self._weight_parts):
            kept.clear()

    def end(self) -> None:
        """Waits until all messages of a step have been sent."""
        self._messages.finish()
        self._group.finish()

    def expected(self, micro_batch: int) -> Activations:
        """The input from the previous stage, on the stage's device; its values may not have arrived yet."""
        tensors = tuple(
            tensor if tensor.device == self.device else torch.empty_like(tensor, device=self.device)
            for tensor in self._received[micro_batch]
        )
        return Activations(self._headers_in[self._keys[micro_batch]].structure, tensors)

    def arrived(self, micro_batch: int) -> tuple[Tensor, ...]:
        """Waits for the tensors of the previous stage, and returns them with their values."""
        self._messages.arrived("forward", Message("forward", self.index - 1, micro_batch))
        tensors = tuple(tensor.to(self.device) for tensor in self._received[micro_batch])
        self._headers_in[self._keys[micro_batch]].require_gradients(tensors)
        self._received[micro_batch] = tensors
        return tuple(tensor.clone() for tensor in tensors) if self._clones_input else tensors

    # Called by schedules

    def expect(self, kind: str, micro_batch: int, *, ahead: bool = False) -> list[dist.P2POp]:
        """Begins to receive the messages that a pass needs, unless that has begun.

        With ``ahead`` it begins only if the shapes are known already.
        """
        if kind == "forward" and not self.is_first and micro_batch not in self._received:
            key, message = self._keys[micro_batch], Message("forward", self.index - 1, micro_batch)
            if key not in self._headers_in:
                if ahead:
                    return []
                self._headers_in[key] = self._group.receive_object(self._previous)
            buffers = self._received[micro_batch] = self._headers_in[key].empty(self._group.device)
            return self._messages.receive(message, buffers, self._previous)
        if kind == "backward" and not self.is_last and micro_batch not in self._gradients:
            outputs = self._outputs.get(micro_batch, ()) if ahead else self._outputs[micro_batch]
            if any(output.requires_grad for output in outputs):
                gradients = self._gradients[micro_batch] = tuple(
                    torch.empty(each.shape, dtype=each.dtype, device=self._group.device) if each.requires_grad else None
                    for each in outputs
                )
                message = Message("backward", self.index + 1, micro_batch)
                return self._messages.receive(message, [g for g in gradients if g is not None], self._following)
        return []

    def outgoing(self, kind: Literal["forward", "backward"], micro_batch: int) -> list[dist.P2POp]:
        """The operations of a pass that the schedule has to post."""
        return self._messages.outgoing(Message(kind, self.index, micro_batch))

    def forward(self, micro_batch: int) -> Activations | Tensor:
        """Runs the forward pass; returns the output, on the last stage the loss."""
        needed = None if self.is_first else Message("forward", self.index - 1, micro_batch)
        self._messages.pass_begins("forward", micro_batch, needed)
        output = self._run(self, micro_batch)
        if isinstance(output, Tensor):
            self._outputs[micro_batch] = (output,)
        else:
            self._outputs[micro_batch] = output.tensors
            self._send_output(micro_batch, output)
        if self._alternates:  # the previous stage had received this gradient before it sent the present input
            self._messages.taken(Message("backward", self.index, micro_batch - (self.num_stages - self.index) - 1))
        self._messages.pass_ends(micro_batch)
        return output

    def backward(self, micro_batch: int, *, full: bool) -> None:
        """Runs the backward pass, if any output requires a gradient.

        Without ``full``, :meth:`weight` computes the gradients of the parameters later.
        """
        outputs, received = self._outputs.pop(micro_batch), self._received.pop(micro_batch, ())
        wanted = [number for number, output in enumerate(outputs) if output.requires_grad]
        computed: Gradients = (None,) * len(received)
        if wanted:
            needed = None if self.is_last else Message("backward", self.index + 1, micro_batch)
            self._messages.pass_begins("backward", micro_batch, needed)
            gradients: Gradients = (None,) * len(outputs)
            if needed is not None:
                self._messages.arrived("backward", needed)
                self._messages.taken(Message("forward", self.index, micro_batch))
                gradients = tuple(None if g is None else g.to(self.device) for g in self._gradients.pop(micro_batch))
            roots, given = [outputs[number] for number in wanted], [gradients[number] for number in wanted]
            computed = self._compute_gradients(micro_batch, roots, given, received, full=full)
        self.needs_input |= any(gradient is not None for gradient in computed)
        if not self.is_first:
            self._send_gradients(micro_batch, received, computed)
        self._messages.pass_ends(micro_batch)

    def weight(self, micro_batch: int) -> None:
        """Runs the part of the backward pass for which no other stage waits."""
        compute = self._weight_parts.pop(micro_batch, None)
        if compute is not None:
            self._messages.pass_begins("weight", micro_batch, None)
            compute()
            self._messages.pass_ends(micro_batch)

    def _send_output(self, micro_batch: int, output: Activations) -> None:
        key, header = self._keys[micro_batch], Header.of(output)
        if key not in self._headers_out:
            self._headers_out[key] = header
            self._group.send_object(header, self._following)
        elif header != self._headers_out[key]:
            raise ValueError(
                f"stage {self.index} sends {header.tensors} (shape, dtype, requires_grad), and for an earlier "
                f"micro-batch of the same shapes it sent {self._headers_out[key].tensors}: shapes of activations have "
                "to follow from those of the batch. If the epoch or a random number decides, cut in "
                "on_after_batch_transfer; freeze and unfreeze layers before a step, in on_train_epoch_start or "
                "on_train_batch_start"
            )
        tensors = [tensor.detach().contiguous() for tensor in output.tensors]
        self._messages.send(Message("forward", self.index, micro_batch), tensors, self._following)

    def _compute_gradients(
        self,
        micro_batch: int,
        outputs: list[Tensor],
        gradients: list[Tensor | None],
        received: tuple[Tensor, ...],
        *,
        full: bool,
    ) -> Gradients:
        if not full and not any(tensor.requires_grad for tensor in received):  # no stage waits for gradients
            self._weight_parts[micro_batch] = lambda: torch.autograd.backward(outputs, gradients)
            return (None,) * len(received)
        key = self._keys[micro_batch]
        if not full and key not in self._divisible:
            obstacle = _obstacle_to_division(outputs, received, self._parameters())
            if self.is_last and obstacle == _NO_PATH:
                full = True  # the loss of a batch that is left out says nothing about other batches
            else:
                self._divisible[key] = obstacle is None
            if not (full or obstacle is None or self._undivided_is_said):
                self._undivided_is_said = True
                warnings.warn(
                    f"stage {self.index} computes the gradients of its inputs and of its weights together, because "
                    f"{obstacle}. The result is the same; idle time of its rank is filled less than schedule="
                    "'zero_bubble' can, as under 'interleaved'",
                    stacklevel=2,
                )
        if full or not self._divisible[key]:
            torch.autograd.backward(outputs, gradients)
        else:
            losses = [output * 1 for output in outputs] if self.is_last else []  # torch detaches the outputs
            self._weight_parts[micro_batch] = _backward_of_inputs(outputs, gradients, received, self._parameters())
            if losses and all(tensor.grad is None for tensor in received):  # it has no path to them, unlike others
                self._weight_parts[micro_batch] = lambda: torch.autograd.backward(losses)
        computed = tuple(tensor.grad for tensor in received)
        for tensor in received:
            tensor.grad = None
        return computed

    def _send_gradients(self, micro_batch: int, received: Sequence[Tensor], computed: Gradients) -> None:
        # A received tensor that a layer returns unchanged has been detached, and no longer requires a gradient.
        header = self._headers_in[self._keys[micro_batch]]
        gradients = [
            torch.zeros_like(tensor) if gradient is None else gradient.contiguous()
            for tensor, gradient, (_, _, requires_grad) in zip(received, computed, header.tensors, strict=True)
            if requires_grad
        ]
        self._messages.send(Message("backward", self.index, micro_batch), gradients, self._previous)


def _backward_of_inputs(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    received: Sequence[Tensor],
    parameters: Sequence[Parameter],
) -> Callable[[], None]:
    """Computes only the gradients of ``received``; returns the function that computes the parameters' gradients.

    The two parts of the backward pass come from Qi et al. 2023, arXiv:2401.10241. The first one keeps the gradients
    that arrive at the nodes that use parameters, and the second one goes on from there. They are correct only without
    an :func:`_obstacle_to_division`, and the outputs are detached in place. torch's own functions for them fail or give
    other sums before torch 2.13: for custom functions, several outputs of a node, and inputs that are not used.
    """
    roots, inputs, weights = map(_nodes, (outputs, received, parameters))
    groups = get_param_groups(inputs, weights, construct_reverse_graph(roots))
    users = [node for group in groups for node in group["intermediates"]]
    arrived: dict[Any, tuple[Tensor | None, ...]] = {}
    owners = []
    if any(isinstance(node, BackwardCFunction) for node in users):  # such an object does not keep its node
        with torch.enable_grad():
            owners = [output.view_as(output).grad_fn for output in outputs]
    wanted = [tensor for tensor in received if tensor.requires_grad]
    handles = [node.register_prehook(functools.partial(arrived.__setitem__, node)) for node in users]
    try:
        found = torch.autograd.grad(outputs, wanted, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    for tensor, gradient in zip(wanted, found, strict=True):
        tensor.grad = gradient
    for output in outputs:
        output.detach_()

    def add_gradients() -> None:
        for group in groups:
            given = {
                GradientEdge(node, number): gradient
                for node in group["intermediates"]
                for number, gradient in enumerate(arrived.pop(node, ()))
                if gradient is not None
            }
            if given:
                leaves = list(group["params"])
                edges = [GradientEdge(leaf, 0) for leaf in leaves]
                found = torch.autograd.grad(list(given), edges, list(given.values()))
                for leaf, gradient in zip(leaves, found, strict=True):
                    if leaf.variable.grad is None:
                        leaf.variable.grad = gradient
                    else:
                        leaf.variable.grad += gradient
        owners.clear()

    return add_gradients


def _nodes(tensors: Sequence[Tensor]) -> list[Any]:
    return [node for node in map(_get_grad_fn_or_grad_acc, tensors) if node is not None]


def _obstacle_to_division(
    outputs: Sequence[Tensor], received: Sequence[Tensor], parameters: Sequence[Parameter]
) -> str | None:
    """Why torch cannot compute the gradients of ``received`` first and of the parameters later; None if it can.

    torch looks for parameters only on paths to the received tensors, so it would miss those of an output that depends
    on no received tensor. It computes the gradient of a parameter from the gradients of all nodes that use it; if one
    of these nodes depends on another, the nodes between the two would run again after they have been freed. ::

        output -> mul -> tanh -> linear -> mul -> received tensor
                   |               |        |
                   g             weight     g
    """
    roots, inputs, weights = map(_nodes, (outputs, received, parameters))
    users = construct_reverse_graph(roots)
    behind_inputs, _ = reverse_closure(inputs, set(), users)
    if not behind_inputs.issuperset(roots):
        return _NO_PATH
    for group in get_param_groups(inputs, weights, users):
        nodes = group["intermediates"]
        if len(nodes) > 1 and any(reverse_closure([node], nodes - {node}, users)[1] for node in nodes):
            return "a parameter is used again on the result of its first use"
    if any(type(node).__name__ in _INDIVISIBLE for node in behind_inputs):
        return "the backward pass of a compiled layer, or of a layer under a reentrant checkpoint, cannot be divided"
    return None
