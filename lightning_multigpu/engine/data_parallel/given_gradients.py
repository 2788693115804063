"""Gradients that the user's code sets or changes, as ``torch.autograd.grad`` gives them, averaged before a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lightning_multigpu.communication.checksums import checksums
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.tensors import marks_of

_ABSENT, _AS_AVERAGED = -1, -2


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
