"""The loss of a batch whose parts were computed by replicas, each in its own thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_multigpu.engine.activation_checkpointing import default_dtype
from lightning_multigpu.engine.micro_batches import combined_loss
from lightning_multigpu.engine.one_process.replica_threads import ReplicaThreads
from lightning_multigpu.engine.replaced_attributes import replaced

Gradients = Sequence[Tensor | None]


@dataclass
class JointLoss:
    """The weighted sum of the replicas' losses; its backward runs each replica's backward in the replica's thread.

    ::

        main thread       joint loss -> scaled, divided, ... -> backward()
                                                                   |  gradient g of the joint loss
        threads            replica 0: gradients of g w0 loss0      replica 1: gradients of g w1 loss1     ...
                                                                   |  all have ended
        main thread       sum of the gradients on the first device -> hooks of the parameters -> parameter.grad

    One ``backward()`` for all replicas would run on one thread on CPUs. A hook of a parameter sees the sum of the
    gradients, once, as on one device.

    Args:
        losses: each replica's loss, on its device.
        weights: the weight of each loss in the sum. A loss of weight 0 is left out: it may be a mean over nothing.
        parameters: each replica's parameters, in one order; the first replica's are the module's.
        reducing: returns the block in which gradients are summed; called with their bytes.
        has_drawn: the forward passes have drawn from a generator that the replicas share. No layer may then run again.
    """

    losses: Sequence[Tensor]
    weights: Sequence[float]
    parameters: Sequence[Sequence[Tensor]]
    threads: ReplicaThreads
    reducing: Callable[[int], AbstractContextManager[object]]
    has_drawn: bool = False
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype, init=False)
    gradient: Tensor = field(init=False)

    def value(self) -> Tensor:
        """The joint loss, on the first device, with a gradient function if a replica's loss has one."""
        device = self.losses[0].device
        total = combined_loss([loss.detach().to(device) for loss in self.losses], self.weights)
        if not any(loss.requires_grad for loss in self.losses) or not self.parameters[0]:
            return total
        replicas = _Replicas.apply(self, *self.parameters[0])  # type: ignore[no-untyped-call]
        joint: Tensor = _JointLoss.apply(self, replicas, total)  # type: ignore[no-untyped-call]
        return joint

    def gradients(self) -> Gradients:
        """The sum of all replicas' gradients for each parameter; None if no loss depends on it. It frees their graphs.

        Raises:
            RuntimeError: a layer runs again although the forward passes have drawn random numbers.
        """
        calls = [partial(self._gradients_of, number) for number in range(len(self.losses))]
        # Layers that run again need the default dtype of their forward pass: threads must not set it one by one.
        # torch.utils.checkpoint sets torch's generator before a layer runs again.
        again = replaced(torch, set_rng_state=_refused if self.has_drawn else _ignored)
        with default_dtype(self.dtype), _without_hooks(self.parameters[0]), again:
            found = self.threads.run(calls, "backward")
        sizes = (gradient.nbytes for gradient in found[0] if gradient is not None and not gradient.is_sparse)
        with self.reducing(sum(sizes)):
            return summed(found, self.parameters[0])

    def _gradients_of(self, number: int) -> Gradients:
        loss, weight, parameters = self.losses[number], self.weights[number], self.parameters[number]
        if not weight or not loss.requires_grad:
            return [None] * len(parameters)
        gradient = self.gradient.to(loss.device, non_blocking=True) * weight
        return torch.autograd.grad(loss, parameters, gradient.to(loss.dtype), allow_unused=True)


class _Replicas(torch.autograd.Function):
    """Forward: the parameters to a number without meaning. Backward: the replicas' gradients to the parameters.

    The number is on the CPU: autograd then runs this backward in the thread that has called ``backward()``. In the
    thread of a GPU it would wait for itself, since the replicas' backward needs that thread.
    """

    @staticmethod
    def forward(ctx: Any, joint: JointLoss, *parameters: Tensor) -> Tensor:
        ctx.joint = joint
        return torch.zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.joint.gradients()


class _JointLoss(torch.autograd.Function):
    """The value of the joint loss; its backward keeps the gradient for the replicas, without a wait for the device."""

    @staticmethod
    def forward(ctx: Any, joint: JointLoss, replicas: Tensor, value: Tensor) -> Tensor:
        ctx.joint = joint
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.joint.gradient = gradient
        return None, torch.zeros(()), None


@contextmanager
def _without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Within the block no hook of a parameter is called: each replica has only a part of the gradient."""
    hooked = [(parameter, parameter._backward_hooks) for parameter in parameters if parameter._backward_hooks]
    for parameter, _ in hooked:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hooks in hooked:
            parameter._backward_hooks = hooks


def _ignored(state: Tensor) -> None:
    """No replica has drawn, so ``torch.utils.checkpoint`` sets the state that torch's generator has.

    Two threads have been seen to wait for each other for ever, one reading the state and one setting it.
    """


def _refused(state: Tensor) -> None:
    raise RuntimeError(
        "a layer runs again in backward, as under torch.utils.checkpoint or activation_checkpointing, and the step "
        "draws random numbers from a generator that all replicas of dp share (torch's of the CPU, Python's or "
        "NumPy's): the layer could draw others than in its forward pass, and gradients would be wrong. Set dropout to "
        "0, draw before the step, keep what the layers compute, or use strategy='ring_ddp'"
    )


def summed(gradients: Sequence[Gradients], parameters: Sequence[Tensor]) -> Gradients:
    """The sum over replicas of each gradient, on the device of its parameter, in the order of the replicas."""
    sums: list[Tensor | None] = []
    for parameter, found in zip(parameters, zip(*gradients, strict=True), strict=True):
        total: Tensor | None = None
        for gradient in (each.to(parameter.device) for each in found if each is not None):
            # Not in place: gradients of two parameters may share memory.
            total = gradient if total is None else total + gradient
        sums.append(total)
    return sums
