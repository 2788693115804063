"""The split part of a module: a chain of layers, each of which takes the output of the previous one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList, Parameter, Sequential
from torch.optim import Optimizer

from lightning_multigpu.engine.hugging_face import block_lists, models_in
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from lightning_multigpu.engine.training_memory import held_bytes
from lightning_multigpu.planning.pipelines.balance import layers_text

_CONTAINERS = (Sequential, ModuleList)
_CUT = (
    "Or cut a forward pass at the submodules that it calls, once a step: PipelineStrategy(split_points=[...]) names "
    "those at which the further stages begin"
)


@dataclass(eq=False)
class Chain:
    """Layers in the order in which they run.

    Attributes:
        around: the modules that contain the layers, the container included, with their names; the outermost first.
        uses: for each tensor outside of the layers that a stage has lacked, by its first name, the parts of a step that
            need it: 0 before the layers, 1 + i layer i, and n + 1 after the last of n layers.
        replicated: names of modules and tensors outside of the layers that all ranks hold; True for all.
    """

    name: str
    layers: tuple[Module, ...]
    around: Mapping[Module, str] = field(default_factory=dict)
    uses: dict[str, set[int]] = field(default_factory=dict)
    replicated: bool | Sequence[str] = False
    is_arranged: bool = True
    tensor_group: TensorGroup | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return len(self.layers)

    def layer_name(self, index: int) -> str:
        return f"{self.name}.{index}"

    def named_layers(self) -> list[tuple[str, Module]]:
        return [(self.layer_name(index), layer) for index, layer in enumerate(self.layers)]

    def describe(self) -> str:
        """A description of the split part, for messages."""
        return f"{self.name!r}, {len(self)} layers"

    def describe_layers(self, start: int, stop: int) -> str:
        """A description of the layers ``[start, stop)``, for messages."""
        return layers_text(start, stop)

    def modules(self) -> set[Module]:
        """All modules inside of the layers."""
        return {part for layer in self.layers for part in layer.modules()}

    def learn(self, uses: Iterable[Mapping[str, Iterable[int]]]) -> None:
        """Adds uses that ranks have found."""
        for found in uses:
            for name, parts in found.items():
                self.uses.setdefault(name, set()).update(parts)

    def unassigned(self) -> Iterable[Tensor]:
        """Parameters and buffers whose layers are not known yet; all stages hold them."""
        return ()

    def entered(self) -> AbstractContextManager[None]:
        """Makes the user's code call the layers within the block."""
        return nullcontext()

    def parameter_bytes(self) -> list[int]:
        """Bytes that this rank holds of each layer's parameters; a shared parameter counts for its first layer."""
        with torch._C.DisableTorchFunctionSubclass():  # split parameters show the whole
            return [sum(parameter.nbytes for parameter in own) for own in self.own_parameters()]

    def training_bytes(self, optimizers: Sequence[Optimizer]) -> list[int]:
        """Bytes of each layer's parameters, their gradients and the states that the optimizers will keep; likewise."""
        return [held_bytes(own, optimizers).total for own in self.own_parameters()]

    def own_parameters(self) -> Iterator[set[Parameter]]:
        """The parameters of each layer that no earlier layer has."""
        seen: set[Parameter] = set()
        for layer in self.layers:
            own = set(layer.parameters()) - seen
            seen |= own
            yield own


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which ``torch.compile`` does not trace when compiled code calls it."""
    reason = "the layers of a pipeline run apart from each other; compile each of them, without fullgraph around them"
    disabled: Callable[..., Any] = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    return disabled


def find_chain(module: Module, name: str, num_stages: int) -> Chain:
    """The container called ``name``; for "auto" the largest container that has a layer for every stage.

    Containers are ``nn.Sequential`` and ``nn.ModuleList``. The largest has most parameters, of which trained ones count
    four times: a student is split, and not its frozen teacher. Of nested containers of equal size the outer one is
    taken. Whether the layers form a chain is checked when they run. In a module with Hugging Face models "auto" takes
    only their lists of blocks, or an ``nn.Sequential`` outside of them.

    Raises:
        ValueError: there is no such container, or it has too few layers; the message lists the containers.
    """
    found = {path: child for path, child in module.named_modules() if isinstance(child, _CONTAINERS)}
    if name != "auto":
        return _named(module, name, num_stages, found)
    blocks = set(block_lists(module))
    in_models = {part for model in models_in(module).values() for part in model.modules()}
    usable = {
        path: child
        for path, child in found.items()
        if (not blocks or path in blocks or (isinstance(child, Sequential) and child not in in_models))
        and len(child) >= num_stages
        and _size(child) > 0
    }
    if not usable:
        raise ValueError(
            f"module='auto' finds no nn.Sequential or nn.ModuleList with {num_stages} layers or more to split into "
            f"{num_stages} stages. {_listing(found)} {_CUT}"
        )
    path = max(usable, key=lambda candidate: _size(usable[candidate]))  # the first of equals is the outer one
    return _chain(module, path, usable[path])


def smallest_around(module: Module, points: Sequence[str]) -> str:
    """The name of the smallest submodule that contains all points and has a forward pass."""
    parts = [point.split(".")[:-1] for point in points]
    common = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))]
    parts_by_name = dict(module.named_modules())
    while common and isinstance(parts_by_name.get(".".join(common)), ModuleList | ModuleDict | None):
        common = common[:-1]
    return ".".join(common)


def _named(module: Module, name: str, num_stages: int, found: dict[str, Sequential | ModuleList]) -> Chain:
    if name not in found:
        kind = next((type(child).__name__ for path, child in module.named_modules() if path == name), None)
        what = "is no part of the module" if kind is None else f"is a {kind}"
        raise ValueError(f"module={name!r} {what}; it must be an nn.Sequential or nn.ModuleList. {_listing(found)}")
    if len(found[name]) < num_stages:
        raise ValueError(
            f"module={name!r} has {len(found[name])} layers for {num_stages} stages; use {len(found[name])} or fewer "
            f"devices, or name a longer chain. {_CUT}"
        )
    return _chain(module, name, found[name])


def _chain(module: Module, path: str, container: Sequential | ModuleList) -> Chain:
    """The chain; warns if a module around the layers was compiled and the layers were not."""
    around = modules_around(module, path)
    if any(map(_is_compiled, around)) and not all(map(_is_compiled, container)):
        warnings.warn(
            f"the layers of {path.replace('._orig_mod', '')!r} are compiled as a whole, and run one by one on their "
            "stages: they run uncompiled; compile each layer by itself with layer.compile()",
            stacklevel=2,
        )
    return Chain(path, tuple(container), around)


def modules_around(module: Module, path: str) -> dict[Module, str]:
    """The submodule at ``path`` and the modules around it, with their names; ``module`` itself first."""
    parts = path.split(".") if path else []
    paths = [".".join(parts[:end]) for end in range(len(parts) + 1)]
    return {module.get_submodule(each): each for each in paths}


def _is_compiled(module: Module) -> bool:
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def _size(container: Module) -> int:
    """Numbers that training keeps: values; of a trained parameter also a gradient, and two states as of Adam."""
    return sum(parameter.numel() * (4 if parameter.requires_grad else 1) for parameter in container.parameters())


def _listing(found: dict[str, Sequential | ModuleList]) -> str:
    if not found:
        return "The module has none."
    return f"The module has {', '.join(f'{path!r} ({len(child)} layers)' for path, child in found.items())}."
