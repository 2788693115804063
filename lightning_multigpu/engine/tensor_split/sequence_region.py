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
from lightning_multigpu.engine.tensor_split.attention import SplitMultiheadAttention
from lightning_multigpu.engine.tensor_split.blocks import Applied, Block
from lightning_multigpu.engine.tensor_split.layers import gather_sequence, split_sequence
from lightning_multigpu.engine.tensor_split.parts import SplitTensor
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup

DIMS = (1, 0)
"""Dimensions that may be the sequence, in the order in which they are tried."""


@dataclass(frozen=True)
class LayerList:
    """A list of layers, each of which has blocks that are split.

    Attributes:
        name: of the list.
        layers: in their order.
        blocks: of all layers.
    """

    name: str
    layers: Sequence[Module]
    blocks: Sequence[Block]


def layer_lists(module: Module, split: Sequence[tuple[Block, Applied]]) -> Iterator[LayerList]:
    """The lists of layers in which every layer has a split block, outer ones before inner ones."""
    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part):
            blocks = [
                [block for block, _ in split if all(_is_in(role, f"{name}.{index}") for role in block.roles)]
                for index in range(len(part))
            ]
            if all(blocks):
                yield LayerList(name, list(part), [each for of_layer in blocks for each in of_layer])


class SequenceRegion:
    """Layers whose activations are split along the sequence, until :meth:`undo`.

    Args:
        module: the whole one.
        found: the layers, with their blocks split.
        group: the ranks.
        dim: the dimension that is split.
        keeps_gathered: column layers keep their gathered input for backward, instead of gathering it again.

    Raises:
        ValueError: in a forward, a layer gets no tensor that could be split.
    """

    def __init__(
        self, module: Module, found: LayerList, group: TensorGroup, *, dim: int, keeps_gathered: bool = True
    ) -> None:
        self._name, self._group, self._dim = found.name, group, dim
        self._handles: list[RemovableHandle] = []
        self._changed: list[tuple[Any, dict[str, Any]]] = []
        for layer in found.layers:
            self._handles.append(layer.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True))
        self._handles.append(found.layers[-1].register_forward_hook(self._end))
        parts: dict[str, Any] = dict(module.named_modules())
        for block in found.blocks:
            for name, role in block.roles.items():
                part = parts[name]
                if role == "attention":
                    assert isinstance(part, SplitMultiheadAttention)
                    self._set(part.out_proj, sequence_dim=dim)
                elif role == "row":
                    self._set(part, sequence_dim=dim)
                if role != "row" and not keeps_gathered:
                    self._set(part, keeps_gathered=False)
                    if getattr(part, "entry", None) is not None:
                        part.entry.keeps_gathered = False

    def undo(self) -> None:
        """Activations are whole again."""
        for handle in self._handles:
            handle.remove()
        for part, attributes in reversed(self._changed):
            for name, value in attributes.items():
                if value is None:
                    vars(part).pop(name, None)
                else:
                    vars(part)[name] = value
        self._handles, self._changed = [], []

    def _set(self, part: Module, **attributes: Any) -> None:
        self._changed.append((part, {name: vars(part).get(name) for name in attributes}))
        vars(part).update(attributes)

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
        return split_sequence(tensor, self._group, self._dim, f"{self._name} sequence")

    def _end(self, layer: Module, _: tuple[Any, ...], output: Any) -> Any:
        outputs = output if isinstance(output, tuple | list) else (output,)
        name = f"{self._name} sequence"
        whole = [gather_sequence(each, name) if isinstance(each, SplitTensor) else each for each in outputs]
        return whole[0] if outputs is not output else type(output)(whole)

    def _is_activation(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > self._dim + 1


def _is_in(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")
