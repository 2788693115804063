"""Consecutive layers between whose blocks activations are parts along the sequence.

Each rank has a part of the tokens for norms, dropout and residual sums. A block gathers all tokens at its entry, and
its row layer gives each rank the sum for that rank's tokens (Korthikanti et al., 2022)::

                layer 0                                              layer 1                  last layer
    rank 0   -->| split | norm -[gather, block, reduce-scatter]- + ->| norm - ... --> ... -->| ... | gather |-->
    rank 1   -->| split | norm -[gather, block, reduce-scatter]- + ->| norm - ... --> ... -->| ... | gather |-->

A layer splits an input that is whole, so that layers may be left out, or run in another order. What lies between is a
:class:`.SplitTensor`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.tensor_split.blocks import Applied, Block
from lightning_multigpu.engine.tensor_split.layers import sequence_placement
from lightning_multigpu.engine.tensor_split.parts import SplitTensor, local, own_of, whole
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup

DIMS = (1, 0)
"""Dimensions that may be the sequence, in the order in which they are tried."""


@dataclass(frozen=True)
class LayerList:
    """A list of layers, each of which has blocks that are split; and the blocks of all of them."""

    name: str
    layers: Sequence[Module]
    blocks: Sequence[Block]


def layer_lists(module: Module, split: Sequence[tuple[Block, Applied]]) -> Iterator[LayerList]:
    """The lists of layers in which every layer has a split block, outer ones before inner ones."""
    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part):
            blocks = [
                [block for block, _ in split if all(f"{role}.".startswith(f"{name}.{index}.") for role in block.roles)]
                for index in range(len(part))
            ]
            if all(blocks):
                yield LayerList(name, list(part), [each for of_layer in blocks for each in of_layer])


class SequenceRegion:
    """Layers whose activations are split along the sequence, until :meth:`undo`.

    Raises:
        ValueError: in a forward, a layer gets no tensor that could be split.
    """

    def __init__(self, module: Module, found: LayerList, group: TensorGroup, *, dim: int) -> None:
        self.name, self._group, self._dim = found.name, group, dim
        self._handles: list[RemovableHandle] = []
        self._rows: list[Any] = []
        for layer in found.layers:
            self._handles.append(layer.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True))
        self._handles.append(found.layers[-1].register_forward_hook(self._end))
        parts: dict[str, Any] = dict(module.named_modules())
        for block in found.blocks:
            for name, role in block.roles.items():
                if role in ("row", "attention"):
                    self._rows.append(parts[name] if role == "row" else parts[name].out_proj)
        for row in self._rows:
            row.sequence_part_dim = dim

    def undo(self) -> None:
        """Activations are whole again."""
        for handle in self._handles:
            handle.remove()
        for row in self._rows:
            del row.sequence_part_dim
        self._handles, self._rows = [], []

    def _begin(
        self, layer: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Splits the first argument that is an activation."""
        for position, each in enumerate(args):
            if self._is_activation(each):
                return (*args[:position], self._part_of(each), *args[position + 1 :]), kwargs
        for name, each in kwargs.items():
            if self._is_activation(each):
                return args, {**kwargs, name: self._part_of(each)}
        raise ValueError(f"{type(layer).__name__} gets no tensor with a dimension {self._dim} to be split")

    def _part_of(self, tensor: Tensor) -> Any:
        if isinstance(tensor, SplitTensor | Placeholder):
            return tensor
        name = f"{self.name} sequence"
        placed = sequence_placement(self._dim, tensor.shape[self._dim], self._group, name)
        return SplitTensor.of(own_of(tensor, placed, name), placed)

    def _end(self, layer: Module, _: tuple[Any, ...], output: Any) -> Any:
        return type(output)(map(self._whole, output)) if isinstance(output, tuple | list) else self._whole(output)

    def _whole(self, value: Any) -> Any:
        """The whole tensor of a part, gathered in the name of the list of layers."""
        if isinstance(value, SplitTensor):
            value = SplitTensor.of(local(value), value.placed._replace(layer=f"{self.name} sequence"))
        return whole(value)

    def _is_activation(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > self._dim + 1
