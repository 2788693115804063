"""The buffers of a module on ranks that train it together, such as BatchNorm's statistics."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.engine.data_parallel.trained_parameters import not_ignored
from lightning_multigpu.engine.placeholder import Placeholder


class ModuleBuffers:
    """Gives the ranks of a group the first one's buffers before steps, or averages of theirs at :meth:`settle`.

    Args:
        averages: ranks train with buffers of their own; floating-point ones are averaged, others become the first
            rank's.
    """

    def __init__(self, module: Module, group: MeteredGroup, *, averages: bool = False) -> None:
        self._module, self._group, self._averages = module, group, averages
        self._is_due = True

    def before_step(self, *, accumulates: bool) -> None:
        """Called before each training step; shares buffers if the step before has ended an accumulation."""
        if self._is_due and not self._averages:
            self.settle()
        self._is_due = not accumulates

    def settle(self) -> None:
        """Gives all ranks the same buffers; a collective."""
        group = self._group
        if group.size == 1:
            return
        named = not_ignored(self._module, self._module.named_buffers())
        own = [buffer.detach() for _, buffer in named if not isinstance(buffer, Placeholder)]  # of this rank's stages
        averaged = [*filter(Tensor.is_floating_point, own)] if self._averages else []
        group.broadcast_tensors([b for b in own if not (averaged and b.is_floating_point())], src=group.first_rank)
        for buffer in averaged:
            buffer.copy_(group.all_reduce(buffer, "mean"))
