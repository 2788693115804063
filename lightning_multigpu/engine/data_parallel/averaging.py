"""Averages over the ranks: of gradients that are there, also of those that the user's code sets or changes, as
``torch.autograd.grad`` gives them, and of models after steps that ranks have taken alone.

Local SGD: every rank takes several optimizer steps of its own, then the ranks average their models. Source: T. Lin,
S. U. Stich, K. K. Patel, M. Jaggi, "Don't use large mini-batches, use local SGD", ICLR 2020; averaging the momentum
with the weights follows J. Wang et al., "SlowMo", ICLR 2020, section 2.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_multigpu.communication.checksums import checksums
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.tensors import alike, apply_flat, marks_of
from lightning_multigpu.engine.data_parallel.outer_optimizer import FLAT_BYTES, OuterOptimizer

_ABSENT, _AS_AVERAGED = -1, -2


@torch.no_grad()
def average_gradients(parameters: Iterable[Tensor], group: MeteredGroup) -> None:
    """Makes each ``.grad`` the average over the ranks; a rank without one has zeros. A collective.

    It stays None where no rank has one; a sparse one becomes dense.
    """
    listed = list(parameters)
    has = torch.tensor([parameter.grad is not None for parameter in listed], dtype=torch.int32)
    dense = []
    for parameter, is_there in zip(listed, group.all_reduce(has, "max").tolist(), strict=True):
        if is_there:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
            dense.append(parameter.grad)
    for members in alike(dense, full_bytes=FLAT_BYTES):
        apply_flat(lambda flat: flat.copy_(group.all_reduce(flat, "mean")), members)


class GivenGradients:
    """Averages gradients that do not come from backward.

    Lightning's ``ddp`` leaves this to the user's code, and ranks then step with gradients of their own. Code that has
    made the average itself has the same gradients on all ranks, and nothing more is sent. ``weight`` returns the weight
    of this rank's batch; the weights of all ranks add up to their number.
    """

    def __init__(self, group: MeteredGroup, weight: Callable[[], float]) -> None:
        self._group = group
        self._weight = weight
        self._averaged: dict[Tensor, tuple[weakref.ref[Tensor], list[tuple[int, int]]]] = {}

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Notes that the gradients of now are averages."""
        with torch._C.DisableTorchFunctionSubclass():  # of split parameters these are the parts
            found = [(parameter, parameter.grad) for parameter in parameters]
            self._averaged.update((p, (weakref.ref(grad), marks_of([grad]))) for p, grad in found if grad is not None)

    @torch.no_grad()
    def average(self, parameters: Iterable[Tensor]) -> None:
        """Averages the gradients that some rank has set or changed, unless all ranks have the same; a collective."""
        listed = list(parameters)
        with torch._C.DisableTorchFunctionSubclass():
            given = {n: p.grad for n, p in enumerate(listed) if p.grad is not None and not self._is_averaged(p)}
            marks = [_ABSENT if parameter.grad is None else _AS_AVERAGED for parameter in listed]
            dense = [gradient.to_dense().contiguous() for gradient in given.values()]
            for number, checksum in zip(given, checksums(dense), strict=True):
                marks[number] = checksum % 2**62
            by_parameter = self._group.all_gather(torch.tensor(marks)).T.tolist()
            for parameter, found in zip(listed, by_parameter, strict=True):
                if max(found) < 0 or len({*found}) == 1:
                    continue
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                average = self._group.all_reduce(gradient.to_dense() * self._weight(), "mean")
                parameter.grad = average.to_sparse(1) if gradient.is_sparse else average
            self.note(listed)

    def _is_averaged(self, parameter: Tensor) -> bool:
        gradient, marks = self._averaged.get(parameter, (lambda: None, []))
        return gradient() is parameter.grad and parameter.grad is not None and marks_of([parameter.grad]) == marks


class ModelAverager:
    """Counts the steps that ranks take alone, and averages weights and optimizer state over the ranks.

    Args:
        every: optimizer steps between two averages.
        average: averages a flat, contiguous tensor on the device of the first parameter over the ranks, in place; a
            collective.
        outer: steps with the averaged change of the weights; ranks then keep optimizer state of their own.

    Attributes:
        steps_alone: optimizer steps that ranks have taken since the last average.
    """

    def __init__(self, every: int, average: Callable[[Tensor], object], outer: OuterOptimizer | None = None) -> None:
        self.every = every
        self._average = average
        self.outer = outer
        self.steps_alone = 0
        self._own_states_on: torch.device | None = None  # None if no rank has optimizer state of its own

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Called before a step, with an outer optimizer."""
        if self.outer is not None and self.steps_alone == 0:
            self.outer.begin(parameters)

    def stepped(self) -> bool:
        """Counts an optimizer step; True if an average is due."""
        self.steps_alone += 1
        return self.steps_alone >= self.every

    def average(self, parameters: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> bool:
        """Averages weights and optimizer state, if ranks have stepped since the last average; a collective.

        Tensors of the optimizer's state are averaged if they have the parameter's shape (momentum, moments). A
        parameter without state on some rank, because it had no gradient there yet, keeps each rank's own state.

        Returns:
            Whether anything was averaged.
        """
        if self.steps_alone == 0:
            return False
        self.steps_alone = 0
        parameters = list(parameters)
        if self.outer is None:
            self._average_all(parameters, optimizers, parameters[0].device)
        else:
            self._average_all(self.outer.step(parameters), (), parameters[0].device)
            self._own_states_on = parameters[0].device
        return True

    def average_states(self, optimizers: Iterable[Optimizer]) -> None:
        """Averages the optimizer state that ranks have kept for themselves, as a checkpoint needs it; a collective."""
        if self._own_states_on is not None:
            device, self._own_states_on = self._own_states_on, None
            self._average_all((), optimizers, device)

    @torch.no_grad()
    def _average_all(self, parameters: Iterable[Tensor], optimizers: Iterable[Optimizer], device: torch.device) -> None:
        found = [*_moments(optimizers)]
        present = torch.tensor([float(bool(of_one)) for of_one in found], device=device)
        if found:
            self._average(present)
        on_all_ranks = [of_one for of_one, share in zip(found, present.tolist(), strict=True) if share == 1]

        def average(flat: Tensor) -> None:
            moved = flat.to(device)  # an optimizer may keep state in the host's memory, which NCCL cannot move
            self._average(moved)
            flat.copy_(moved)

        for tensors in alike([*parameters, *chain.from_iterable(on_all_ranks)], full_bytes=FLAT_BYTES):
            apply_flat(average, tensors)


def _moments(optimizers: Iterable[Optimizer]) -> Iterator[list[Tensor]]:
    """The tensors to average of each parameter's state, in an order that is the same on all ranks."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                values = [state[name] for name in sorted(state, key=str) if isinstance(state[name], Tensor)]
                yield [v for v in values if v.shape == parameter.shape and v.is_floating_point()]
