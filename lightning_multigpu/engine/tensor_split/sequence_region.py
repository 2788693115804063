"""Consecutive layers between whose blocks activations are split along the sequence.

Each rank has a part of the tokens for norms, dropout and residual sums. A block gathers all tokens at its entry, and
its row layer gives each rank the sum for that rank's tokens (Korthikanti et al., 2022)::

                layer 0                                              layer 1                  last layer
    rank 0   -->| split | norm -[gather, block, reduce-scatter]- + ->| norm - ... --> ... -->| ... | gather |-->
    rank 1   -->| split | norm -[gather, block, reduce-scatter]- + ->| norm - ... --> ... -->| ... | gather |-->

The gather of an attention stands before the smallest module that contains all of its column layers, so that the code
of that module sees the length of the whole sequence. The gather of other blocks stands before the column layers
themselves, so that a residual sum in their module adds parts to parts. Where the step then computes something else, the
other place is tried.

In a pipeline, ranks of a stage send their parts to the ranks of the next stage that have the same tokens. Every stage
runs the step from its beginning, and knows the length of the whole sequence from the input of layer 0, which may be a
placeholder there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from lightning_multigpu.engine.tensor_split.attention import SplitMultiheadAttention
from lightning_multigpu.engine.tensor_split.block_input import BlockInput, gather
from lightning_multigpu.engine.tensor_split.blocks import Applied, Block
from lightning_multigpu.engine.tensor_split.layers import gather_sequence, split_sequence
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup

GathersAt = Literal["module", "columns"]
WAYS: tuple[tuple[int, GathersAt | None], ...] = tuple(
    (dim, at) for dim in (1, 0) for at in (None, "columns", "module")
)
"""Dimensions and places, in the order in which they are tried."""


@dataclass(frozen=True)
class LayerList:
    """A list of layers, each of which has blocks that are split.

    Attributes:
        name: of the list.
        layers: in their order.
        blocks: of each layer.
    """

    name: str
    layers: Sequence[Module]
    blocks: Sequence[Sequence[tuple[Block, Applied]]]


def layer_lists(module: Module, split: Sequence[tuple[Block, Applied]]) -> Iterator[LayerList]:
    """The lists of layers in which every layer has a split block, outer ones before inner ones."""
    for name, part in module.named_modules():
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part):
            blocks = [
                [each for each in split if all(_is_in(role, f"{name}.{index}") for role in each[0].roles)]
                for index in range(len(part))
            ]
            if all(blocks):
                yield LayerList(name, list(part), blocks)


class SequenceRegion:
    """Layers whose activations are split along the sequence, until :meth:`undo`.

    Args:
        module: the whole one.
        found: the layers, with their blocks split.
        group: the ranks.
        dim: the dimension that is split.
        gathers_at: where blocks gather: "module", "columns", or None for the usual places.
        keeps_gathered: column layers keep their gathered input for backward, instead of gathering it again.

    Raises:
        RuntimeError: in a forward, layers run in another order, or the last one does not run.
        ValueError: in a forward, a layer or a block gets no tensor that could be split.
    """

    def __init__(
        self,
        module: Module,
        found: LayerList,
        group: TensorGroup,
        *,
        dim: int,
        gathers_at: GathersAt | None = None,
        keeps_gathered: bool = True,
    ) -> None:
        self._name = found.name
        self._group = group
        self._dim = dim
        self._keeps_gathered = keeps_gathered
        self._num_layers = len(found.layers)
        self._length = 0
        self._device = torch.device("cpu")
        self._first = 0
        self._newest: int | None = None
        """The layer that has begun last in this step; None before the first one."""
        self._is_open = False
        """Whether activations are split at this point of the step."""
        self._handles: list[RemovableHandle] = []
        self._changed: list[tuple[Module, dict[str, Any]]] = []
        parts = dict(module.named_modules())
        for index, (layer, blocks) in enumerate(zip(found.layers, found.blocks, strict=True)):
            self._handles += [
                layer.register_forward_pre_hook(partial(self._begin, index), prepend=True, with_kwargs=True),
                layer.register_forward_hook(partial(self._end, index)),
            ]
            for block, _ in blocks:
                place = gathers_at or ("module" if block.shape == "attention" else "columns")
                self._split(parts, block, f"{found.name}.{index}", place)
        caller = parts[_common_parent(parts, [f"{found.name}.{index}" for index in range(self._num_layers)])]
        self._handles.append(caller.register_forward_hook(self._end_of_module))

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

    def begin_step(self) -> None:
        """A step begins, with whole activations; a stage of a pipeline may have ended the one before within a list."""
        self._newest, self._is_open = None, False

    def end_step(self) -> None:
        """A step has ended.

        Raises:
            RuntimeError: the last layer has not run.
        """
        if self._is_open:
            raise self._is_left_open("a step ends")

    # Blocks

    def _split(self, parts: Mapping[str, Module], block: Block, layer: str, place: GathersAt) -> None:
        columns = [name for name, role in block.roles.items() if role == "column"]
        for name, role in block.roles.items():
            part = parts[name]
            if role == "attention":
                assert isinstance(part, SplitMultiheadAttention)
                self._set(part, entry=self._gathers(name))
                self._set(part.out_proj, sequence_dim=self._dim)
            elif role == "row":
                self._set(part, sequence_dim=self._dim)
        if not columns:
            return
        entry = _common_parent(parts, columns)
        if place == "module" and entry.startswith(f"{layer}."):
            hook = partial(self._change_first, change=self._gathers(columns[0]))
            self._handles.append(parts[entry].register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
            for name in columns:
                self._set(parts[name], entry=_as_it_is)
        else:
            shared = BlockInput(self._gathers(columns[0]), parts[columns[-1]])
            for name in columns:
                self._set(parts[name], entry=shared)

    def _gathers(self, name: str) -> Callable[[Tensor], Tensor]:
        return lambda part: gather(
            part, self._group, self._dim, self._length, name, keeps_gathered=self._keeps_gathered
        )

    def _set(self, part: Module, **attributes: Any) -> None:
        self._changed.append((part, {name: vars(part).get(name) for name in attributes}))
        vars(part).update(attributes)

    # Layers

    def _begin(
        self, index: int, layer: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not _is_in_backward():
            if index != self._newest:  # a measurement may run a layer twice
                if not self._is_open:
                    self._first = index
                elif self._newest is not None and index < self._newest:
                    raise self._is_left_open(f"{self._name}.{index} runs")
                self._newest = index
            self._is_open = True
        if index == self._first:
            args, kwargs = self._change_first(layer, args, kwargs, self._split_whole)
        self._group.sequence_random.forget()
        if layer.training:
            self._group.sequence_random.enter(self._device)
        return args, kwargs

    def _end(self, index: int, layer: Module, _: tuple[Any, ...], output: Any) -> Any:
        self._group.sequence_random.leave(self._device)
        if index < self._num_layers - 1:
            return output
        if not _is_in_backward():
            self._is_open = False
        outputs = output if isinstance(output, tuple | list) else (output,)
        for position, each in enumerate(outputs):
            if self._is_activation(each):
                whole = gather_sequence(each, self._group, self._dim, self._length, f"{self._name} sequence")
                if outputs is not output:
                    return whole
                return type(output)([*outputs[:position], whole, *outputs[position + 1 :]])
        raise ValueError(f"{type(layer).__name__} returns no tensor with a dimension {self._dim} to be gathered")

    def _end_of_module(self, module: Module, *_: Any) -> None:
        if self._is_open and not _is_in_backward():
            raise self._is_left_open(f"{type(module).__name__} returns")

    def _is_left_open(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{what} before the last layer, {self._name}.{self._num_layers - 1}, has run, so that each rank has a part "
            "of the tokens: where layers are left out at random (LayerDrop) or run in another order, run the last "
            "layer always, or use sequence_split=False"
        )

    def _split_whole(self, whole: Tensor) -> Tensor:
        self._length, self._device = whole.shape[self._dim], whole.device
        return split_sequence(whole, self._group, self._dim, f"{self._name} sequence")

    def _change_first(
        self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Changes the first argument that is an activation."""
        for position, each in enumerate(args):
            if self._is_activation(each):
                return (*args[:position], change(each), *args[position + 1 :]), kwargs
        for name, each in kwargs.items():
            if self._is_activation(each):
                return args, {**kwargs, name: change(each)}
        raise ValueError(f"{type(module).__name__} gets no tensor with a dimension {self._dim} to be split")

    def _is_activation(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > self._dim + 1


def _as_it_is(input: Tensor, _: Any) -> Tensor:
    """The entry of column layers whose module has gathered the input."""
    return input


def _is_in_backward() -> bool:
    """Whether an activation checkpoint computes a layer again; torch.utils.checkpoint asks autograd in this way too."""
    return torch._C._current_graph_task_id() != -1


def _is_in(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")


def _common_parent(parts: Mapping[str, Module], names: Sequence[str]) -> str:
    """The smallest module that contains all of these and is called itself."""
    parent = names[0].rpartition(".")[0]
    while parent and (
        isinstance(parts[parent], nn.ModuleList | nn.ModuleDict)
        or not all(name.startswith(f"{parent}.") for name in names)
    ):
        parent = parent.rpartition(".")[0]
    return parent
