"""Proof that split layers train as whole ones: gradients of a step before the split and after it.

::

    whole layers   step, backward   gradient of each parameter  | g0 | g1 |   in host memory
    split layers   step, backward   of its part, on rank 0      | g0 |        compared; rank 1 compares g1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_multigpu.engine.gradient_check import SMALLEST, Gradients, moved_weights, norm_of, without_gradients
from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from lightning_multigpu.planning.numbers import size

_NOT_PROVED = "Whether split layers train as whole ones is not proved"


class SplitProof:
    """Compares gradients of a step on whole layers with those on split layers; made before the split.

    Weights are moved by 1 % meanwhile: one that starts at zero, as in a gate, hides its factor. Ranks draw random
    numbers of their own for parts of tensors. So a step that draws some is run in evaluation mode.

    Args:
        module: whole, and the same on all ranks.
        group: the ranks among which its layers will be split.
        loss: runs the step and returns its loss; None if it has run backward itself.
        traceless: a block at whose end the module and random states are as before it.
        gather: returns the objects of all ranks, also of other groups, on every rank.
        rtol: the relative difference of gradients that rounding explains.
        num_steps: so many steps are compared, each at other weights.

    Attributes:
        obstacle: why nothing is compared; None if it is. The same on all ranks.
    """

    def __init__(
        self,
        module: Module,
        group: TensorGroup,
        loss: Callable[[], Tensor | None],
        *,
        traceless: Callable[[], AbstractContextManager[None]],
        gather: Callable[[Any], list[Any]],
        rtol: float,
        num_steps: int,
    ) -> None:
        self._module, self._group, self._loss = module, group, loss
        self._traceless, self._gather, self._rtol = traceless, gather, rtol
        self._trains = True
        self._sizes: dict[str, float] = {}
        self._expected: list[Gradients] = []
        needed = num_steps * group.size * sum(each.nbytes for each in self._trained().values())
        available = psutil.virtual_memory().available
        obstacle = f"gradients take {size(needed)} of {size(available)}" if needed > available else None
        try:
            if obstacle is None and self._draws():
                self._trains = False
            self._expected = [self._gradients(step) for step in range(0 if obstacle else num_steps)]
        except Exception as error:  # of the user's code, which may work in training mode only, or of the device
            obstacle = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200]
        if not all(bool(torch.isfinite(each).all()) for of_step in self._expected for each in of_step.values()):
            obstacle = "gradients of whole layers are not finite"
        obstacle = next(filter(None, gather(obstacle)), None)
        self.obstacle = None if obstacle is None else f"{_NOT_PROVED}: {obstacle}"

    def difference(self) -> str | None:
        """What differs on split layers, as the beginning of a message; a collective of all ranks."""
        if self.obstacle is not None:
            return None
        worst: tuple[float, str] = (0.0, "")
        wrong: dict[str, None] = {}
        for step, expected in enumerate(self._expected):
            found, parameters = self._gradients(step), self._trained()
            smallest = SMALLEST * max(map(norm_of, expected.values()), default=0.0)
            for name, whole in expected.items():
                split = split_of(parameters[name])
                own = whole if split is None else split.part(whole, self._group.rank)
                error = norm_of(found.get(name), own) / max(norm_of(whole), smallest, 1e-300)
                if not error <= self._rtol:
                    wrong[name] = None
                    worst = max(worst, (math.inf if math.isnan(error) else error, name))
        everyone = self._gather((worst, list(wrong)))
        (error, name), names = max(each for each, _ in everyone), dict.fromkeys(n for _, each in everyone for n in each)
        if not names:
            return None
        return (
            f"split layers would train other gradients than whole ones: in a dry run of the first batch {len(names)} "
            f"parameters differ, most {name!r} (relative difference {error:.2g}, rounding explains {self._rtol:.0e})"
        )

    def _trained(self) -> dict[str, Parameter]:
        return {name: parameter for name, parameter in self._module.named_parameters() if parameter.requires_grad}

    def _draws(self) -> bool:
        """Whether the step draws random numbers in training mode."""
        with self._running(self._trained()), self._group.showing(parts=False):
            before = self._random_states()
            self._loss()
            return any(not torch.equal(one, other) for one, other in zip(before, self._random_states(), strict=True))

    def _random_states(self) -> list[Tensor]:
        device = next(self._module.parameters()).device
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]

    def _gradients(self, step: int) -> Gradients:
        """This rank's gradients, in host memory: of whole parameters, or of its parts."""
        parameters = self._trained()
        moved = moved_weights(parameters, step=step, rank=self._group.rank, sizes=self._sizes)
        with self._running(parameters), moved:
            if not self._trains:
                self._module.eval()
            with self._group.showing(parts=False):
                loss = self._loss()
                if loss is not None and loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
            grads = {name: parameter.grad for name, parameter in parameters.items()}
            return {
                name: (grad.to_dense() if grad.is_sparse else grad).detach().to("cpu", copy=True)
                for name, grad in grads.items()
                if grad is not None
            }

    @contextmanager
    def _running(self, parameters: dict[str, Parameter]) -> Iterator[None]:
        """Restores what a step changes, also one that optimizes manually and fails while other optimizers' rest."""
        try:
            with self._traceless(), without_gradients(parameters.values()):
                yield
        finally:
            for parameter in parameters.values():
                parameter.requires_grad_(True)
