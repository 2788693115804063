"""The part of a module that is split: layers of which each takes the output of the one before."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Module, ModuleList, Sequential

from lightning_multigpu.engine.pipeline.splitting.hugging_face import block_lists, models_in

_CONTAINERS = (Sequential, ModuleList)


@dataclass(eq=False)
class Chain:
    """Layers in the order in which they run.

    Attributes:
        name: of the container in the module, "layers" for example.
        layers: the container's children.
    """

    name: str
    layers: tuple[Module, ...]

    def __len__(self) -> int:
        return len(self.layers)

    def layer_name(self, index: int) -> str:
        return f"{self.name}.{index}"

    def describe(self) -> str:
        """What is split, for people."""
        return f"{self.name!r}, {len(self)} layers"

    def describe_layers(self, start: int, stop: int) -> str:
        """The layers ``[start, stop)``, for people."""
        return f"layers {start} to {stop - 1}" if stop - start > 1 else f"layer {start}"

    def modules(self) -> set[Module]:
        """All modules of which layers are made: what else there is belongs to every stage."""
        return {part for layer in self.layers for part in layer.modules()}

    def waiting(self) -> Iterable[Tensor]:
        """Parameters and buffers of which it is not known yet which layers they belong to; all stages hold them."""
        return ()

    def entered(self) -> AbstractContextManager[None]:
        """Within the block the user's code that runs the container calls the layers."""
        return nullcontext()

    def parameter_bytes(self) -> list[int]:
        """Of each layer; a parameter that an earlier layer has too counts for that one."""
        seen: set[Tensor] = set()
        sizes = []
        for layer in self.layers:
            own = set(layer.parameters()) - seen
            seen |= own
            sizes.append(sum(parameter.numel() * parameter.element_size() for parameter in own))
        return sizes


def find_chain(module: Module, name: str, num_stages: int) -> Chain:
    """The container called ``name``, or for "auto" the one with the most parameters that has a layer for every stage.

    Containers are ``nn.Sequential`` and ``nn.ModuleList``. Of nested ones with equally many parameters the outer one
    is taken. That the layers do form a chain is found out when they run. Where there are Hugging Face models, only
    their lists of blocks and an ``nn.Sequential`` outside of them are sure to be chains, and "auto" takes no other.

    Raises:
        ValueError: there is no such container, or it has too few layers; the message lists what there is.
    """
    found = {path: child for path, child in module.named_modules() if isinstance(child, _CONTAINERS)}
    if name != "auto":
        return _named(module, name, num_stages, found)
    usable = {
        path: found[path]
        for path in _likely(module, found)
        if len(found[path]) >= num_stages and _size(found[path]) > 0
    }
    if not usable:
        raise ValueError(
            f"module='auto' finds no nn.Sequential or nn.ModuleList with {num_stages} layers or more to split into "
            f"{num_stages} stages. {_listing(found)} Use fewer devices, or put the layers into such a container"
        )
    path = max(usable, key=lambda candidate: _size(usable[candidate]))  # the first of equals, which is the outer one
    return Chain(path, tuple(usable[path]))


def _named(module: Module, name: str, num_stages: int, found: dict[str, Sequential | ModuleList]) -> Chain:
    if name not in found:
        kind = next((type(child).__name__ for path, child in module.named_modules() if path == name), None)
        what = "is no part of the module" if kind is None else f"is a {kind}"
        raise ValueError(f"module={name!r} {what}; it must be an nn.Sequential or nn.ModuleList. {_listing(found)}")
    if len(found[name]) < num_stages:
        raise ValueError(
            f"module={name!r} has {len(found[name])} layers for {num_stages} stages; use {len(found[name])} or fewer "
            "devices, or name a longer chain"
        )
    return Chain(name, tuple(found[name]))


def _likely(module: Module, found: dict[str, Sequential | ModuleList]) -> list[str]:
    """The containers that "auto" may take."""
    blocks = set(block_lists(module))
    if not blocks:
        return list(found)
    inside = {part for model in models_in(module).values() for part in model.modules()}
    return [
        path
        for path, child in found.items()
        if path in blocks or (isinstance(child, Sequential) and child not in inside)
    ]


def _size(container: Module) -> int:
    return sum(parameter.numel() for parameter in container.parameters())


def _listing(found: dict[str, Sequential | ModuleList]) -> str:
    if not found:
        return "The module has none."
    return f"The module has {', '.join(f'{path!r} ({len(child)} layers)' for path, child in found.items())}."
