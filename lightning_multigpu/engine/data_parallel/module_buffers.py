"""The buffers of a module on ranks that train it together, such as BatchNorm's statistics."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.tensors import alike, apply_flat
from lightning_multigpu.engine.placeholder import Placeholder


class ModuleBuffers:
    """Gives the ranks of a group the first one's buffers before steps, or averages of theirs at :meth:`settle`.

    Before steps these are the buffers of the layers that were there at the last :meth:`settle`.

    Args:
        averages: ranks train with buffers of their own; floating-point ones are averaged, others become the first
            rank's.
    """

    def __init__(self, module: Module, group: MeteredGroup, *, averages: bool = False) -> None:
        self._module, self._group, self._averages = module, group, averages
        self._is_due = True
        self._of_layers: list[tuple[dict[str, Tensor | None], set[str]]] = []

    def before_step(self, *, accumulates: bool) -> None:
        """Called before each training step; shares buffers if the step before has ended an accumulation."""
        if self._is_due and not self._averages:
            self._share()
        self._is_due = not accumulates

    def settle(self) -> None:
        """Gives all ranks the same buffers, also of layers that are new; a collective."""
        ignored = {*getattr(self._module, "_ddp_params_and_buffers_to_ignore", ())}
        self._of_layers = [
            (layer._buffers, {name for name in layer._buffers if f"{path}{'.' * bool(path)}{name}" in ignored})
            for path, layer in self._module.named_modules()
        ]
        self._share()

    def _share(self) -> None:
        group = self._group
        if group.size == 1:
            return
        if not self._of_layers:
            self.settle()
            return
        # Those of this rank's stages. Walking through the module's tree would take ten times as long.
        own = [
            buffer.detach()
            for buffers, ignored in self._of_layers
            for name, buffer in buffers.items()
            if buffer is not None and not isinstance(buffer, Placeholder) and name not in ignored
        ]
        averaged = [*filter(Tensor.is_floating_point, own)] if self._averages else []
        group.broadcast_tensors([b for b in own if not (averaged and b.is_floating_point())], src=group.first_rank)
        for members in alike(averaged):
            apply_flat(lambda flat: flat.copy_(group.all_reduce(flat, "mean")), members)
