"""The split part of a module: a chain of layers, each of which takes the output of the previous one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module, ModuleList, Parameter, Sequential

from lightning_multigpu.engine.pipeline.splitting.hugging_face import block_lists, models_in
from lightning_multigpu.planning.balance import layers_text

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
        """The split part, for people."""
        return f"{self.name!r}, {len(self)} layers"

    def describe_layers(self, start: int, stop: int) -> str:
        """The layers ``[start, stop)``, for people."""
        return layers_text(start, stop)

    def modules(self) -> set[Module]:
        """All modules inside of the layers; every stage has the modules outside."""
        return {part for layer in self.layers for part in layer.modules()}

    def unassigned(self) -> Iterable[Tensor]:
        """Parameters and buffers whose layers are not known yet; all stages hold them."""
        return ()

    def entered(self) -> AbstractContextManager[None]:
        """Makes the user's code call the layers within the block."""
        return nullcontext()

    @contextmanager
    def intercepted(self, call: Callable[..., Any]) -> Iterator[None]:
        """Runs ``call(i, forward, args, kwargs)`` in place of layer i's forward within the block."""
        with patched_forward(self.layers, call), self.entered():
            yield

    def parameter_bytes(self) -> list[int]:
        """Bytes of each layer's parameters; a parameter of several layers counts for the first of them."""
        return [sum(parameter.nbytes for parameter in own) for own in self.own_parameters()]

    def own_parameters(self) -> Iterator[set[Parameter]]:
        """The parameters of each layer that no earlier layer has."""
        seen: set[Parameter] = set()
        for layer in self.layers:
            own = set(layer.parameters()) - seen
            seen |= own
            yield own


@contextmanager
def patched_forward(modules: Sequence[Module], call: Callable[..., Any]) -> Iterator[None]:
    """Runs ``call(i, forward, args, kwargs)`` in place of the forward of module i within the block."""
    before = [module.__dict__.get("forward") for module in modules]

    def patched(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: call(index, forward, args, kwargs)

    for index, module in enumerate(modules):
        module.__dict__["forward"] = patched(index, module.forward)
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward


def find_chain(module: Module, name: str, num_stages: int) -> Chain:
    """The container called ``name``; for "auto" the container with most parameters that has a layer for every stage.

    Containers are ``nn.Sequential`` and ``nn.ModuleList``. Of nested containers with equally many parameters the outer
    one is taken. Whether the layers form a chain is checked when they run. In a module with Hugging Face models "auto"
    takes only their lists of blocks, or an ``nn.Sequential`` outside of them.

    Raises:
        ValueError: there is no such container, or it has too few layers; the message lists the containers.
    """
    found = {path: child for path, child in module.named_modules() if isinstance(child, _CONTAINERS)}
    if name != "auto":
        return _named(module, name, num_stages, found)
    usable = {
        path: found[path]
        for path in _candidates(module, found)
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


def _candidates(module: Module, found: dict[str, Sequential | ModuleList]) -> list[str]:
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
