"""Proof that split layers train as whole ones: gradients of a step before the split and after it.

::

    whole layers   step, backward   gradient of each parameter  | g0 | g1 |   in host memory
    split layers   step, backward   of its part, on rank 0      | g0 |        compared; rank 1 compares g1
"""

from __future__ import annotations

import torch

from lightning_multigpu.engine.parity import (
    Gradients,
    are_finite,
    difference,
    lack_of_memory,
    moved_weights,
    norm_of,
    take_gradients,
)
from lightning_multigpu.engine.step_state import torch_random_states
from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.engine.tensor_split.trials import TracelessStep, error_of_users


class SplitProof:
    """Compares gradients of a step on whole layers with those on split layers; made before the split.

    Ranks draw random numbers of their own for parts of tensors. So a step that draws some is run in evaluation mode.

    Args:
        step: of a module whose layers will be split.
        rtol: the relative difference of gradients that rounding explains.

    Attributes:
        obstacle: why nothing is compared; empty if it is. The same on all ranks.
    """

    def __init__(self, step: TracelessStep, *, rtol: float) -> None:
        self._step, self._module, self._group, self._rtol = step, step.module, step.group, rtol
        self._parameters = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        self._trains = True
        self._sizes: dict[str, float] = {}
        self._expected: Gradients = {}
        needed = self._group.size * sum(each.nbytes for each in self._parameters.values())
        obstacle = lack_of_memory("gradients", needed, torch.device("cpu"))
        try:
            if not obstacle:
                self._trains = not self._draws()
                self._expected = self._gradients()
                obstacle = "" if are_finite(self._expected) else "gradients of whole layers are not finite"
        except Exception as error:  # a step may work in training mode only
            obstacle = error_of_users(error)
        obstacle = step.first_of_ranks(obstacle)
        self.obstacle = obstacle and f"Whether split layers train as whole ones is not proved: {obstacle}"

    def check(self) -> None:
        """Compares, where there is no obstacle; a collective of all ranks.

        Raises:
            ValueError: gradients of split layers differ.
        """
        own = {
            name: whole if (split := split_of(self._parameters[name])) is None else split.part(whole, self._group.rank)
            for name, whole in self._expected.items()
        }
        norms = {name: norm_of(whole) for name, whole in self._expected.items()}
        found = difference(self._gradients(), own, self._rtol, norms=norms, gather=self._step.gather)
        if found is not None:
            raise ValueError(
                "split layers would train other gradients than whole ones: in a dry run of the first batch "
                f"{found}. A layer or a function computes something else on a part of a tensor, in code that "
                "torch's functions do not show. Keep such layers whole, by plan={'*.first': 'column', '*.second': "
                "'row'} without them, or use strategy='ring_ddp'; verify_steps=0 trains all the same"
            )

    def _draws(self) -> bool:
        """Whether the step draws random numbers in training mode."""
        device = next(self._module.parameters()).device
        with self._step.running():
            before = torch_random_states(device)
            self._step.forward()
            return not all(map(torch.equal, before, torch_random_states(device)))

    def _gradients(self) -> Gradients:
        """This rank's gradients, in host memory: of whole parameters, or of its parts."""
        with moved_weights(self._parameters, rank=self._group.rank, sizes=self._sizes), self._step.running():
            if not self._trains:
                self._module.eval()
            self._step.forward_and_backward()
            with self._group.showing(parts=True):
                return take_gradients(self._module)
