"""Activation checkpointing: intermediate results of layers are not saved, but computed again in backward.

``torch.utils.checkpoint.checkpoint`` calls a layer, with its hooks, saves its input, and calls it again in backward
(T. Chen et al., 2016, "Training deep nets with sublinear memory cost", section 4). The second call here gets what torch
does not restore: the default dtype and the random numbers of Python and NumPy of the first one, and parts of split
tensors; BatchNorm counts a batch once. A layer that changes its input or a buffer is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList, Sequential
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.hugging_face import caching_models, without_cache
from lightning_multigpu.engine.replaced_attributes import replaced
from lightning_multigpu.engine.step_state import preserved_random_state
from lightning_multigpu.engine.tensor_split.parts import SplitTensor, local

Choice = bool | Sequence[str | type]
"""All or no layers; or classes, names of classes ("Block") and names of layers ("blocks.3")."""


class RecomputationError(PipelineError):
    """A layer that cannot be computed again in backward."""


def check_choice(choice: object) -> None:
    """Raises ValueError if ``activation_checkpointing=choice`` is neither a bool nor a list of classes and names."""
    entries: Any = choice if isinstance(choice, Sequence) and not isinstance(choice, str) else [None]
    if not isinstance(choice, bool) and not all(isinstance(entry, str | type) for entry in entries):
        raise ValueError(
            f"activation_checkpointing={choice!r} is neither a bool nor a list of classes, names of classes and names "
            "of layers; pass True for all layers, or a list such as ['Block']"
        )


def selected_layers(module: Module, choice: Choice) -> list[str]:
    """Names of the layers that ``activation_checkpointing=choice`` selects in a module that runs as a whole.

    True selects what is inside of each ``nn.Sequential`` and ``nn.ModuleList`` with parameters; a list selects among
    all submodules. Of nested layers the outer one counts.

    Raises:
        ValueError: nothing is selected, an entry selects no submodule, or a module around a layer is compiled.
    """
    parts = dict(module.named_modules())
    lists = tuple(
        f"{name}.".removeprefix(".")
        for name, part in parts.items()
        if isinstance(part, Sequential | ModuleList) and any(True for _ in part.parameters())
    )
    del parts[""]
    layers = _outermost(
        name for name, part in parts.items() if name.startswith(lists) and not isinstance(part, ModuleList | ModuleDict)
    )
    owner = type(module).__name__
    if choice is True and not layers:
        raise ValueError(
            f"activation_checkpointing=True: no module of {owner} is an nn.Sequential or an nn.ModuleList with "
            f"parameters; pass classes or names of modules, such as {[*parts][:6]}"
        )
    if choice is not True:
        layers = _outermost(_matching(choice, parts, owner, layers or [*parts]))
    for name, part in parts.items():
        inside = next((each for each in layers if each.startswith(f"{name}.")), None)
        if inside and (part._compiled_call_impl is not None or "_orig_mod" in part._modules):
            raise ValueError(
                f"{name} is compiled as a whole, and activation_checkpointing runs {inside} inside of it by itself: "
                "compile each layer with layer.compile(), or leave one of the two out"
            )
    return layers


def _outermost(names: Iterable[str]) -> list[str]:
    """The names that are not inside of another one; in the order of ``named_modules``."""
    found: list[str] = []
    for name in names:
        if not (found and name.startswith(f"{found[-1]}.")):
            found.append(name)
    return found


def layers_of(chain: str, layers: Sequence[tuple[str, Module]], choice: Choice) -> frozenset[int]:
    """The indices of the named layers of the chain with this name that ``activation_checkpointing=choice`` selects.

    Raises:
        ValueError: an entry selects no layer; the message lists layers.
    """
    named = dict(layers)
    found = named if choice is True else _matching(choice, named, repr(chain), [*named])
    return frozenset(map([*named].index, found))


def _matching(choice: Choice, parts: Mapping[str, Module], owner: str, shown: Sequence[str]) -> list[str]:
    """The names of the parts that the entries of a choice select, in the order of the parts."""
    found = set[str]()
    for entry in choice or ():  # type: ignore[union-attr]
        matching = {
            name
            for name, part in parts.items()
            if (entry in (name, type(part).__name__) if isinstance(entry, str) else isinstance(part, entry))
        }
        if not matching:
            text = entry.__name__ if isinstance(entry, type) else repr(entry)
            classes = ", ".join(sorted({type(part).__name__ for part in parts.values()}))
            raise ValueError(
                f"activation_checkpointing=[{text}] names no layer of {owner}, whose layers are of the classes "
                f"{classes}, with names such as {shown[:6]}; pass some of these, or True"
            )
        found |= matching
    return [name for name in parts if name in found]


@contextmanager
def recomputing(names: Sequence[str], *modules: Module) -> Iterator[None]:
    """Within the block, a training step, layers of these names run so that backward, also after it, runs them again.

    ``modules`` are the module, or copies of it. Within the block Hugging Face models cache no keys and values: a
    layer's second run would find its own. Raises RecomputationError as :func:`recomputed`.
    """

    def call(layer: Module, own: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return recomputed(layer, own, args, kwargs) if torch.is_grad_enabled() else own(*args, **kwargs)

    hook = partial(without_cache, "the blocks under activation_checkpointing would find their own keys")
    with ExitStack() as undo:
        for module in modules if names else ():
            for layer in map(module.get_submodule, names):  # ours instead of hooks and forward
                again = partial(call, layer, layer._compiled_call_impl or layer._call_impl)
                undo.enter_context(replaced(layer, _compiled_call_impl=again))
            for model in caching_models(module):
                undo.callback(model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove)
        yield


def recomputed(layer: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns ``forward(*args, **kwargs)``, whose backward pass runs ``forward`` again.

    Raises:
        RecomputationError: the layer has changed a buffer, or its input although it has no true attribute ``inplace``.
    """
    python_state, numpy_state, dtype = random.getstate(), numpy.random.get_state(), torch.get_default_dtype()
    ran = False
    leaves, structure = tree_flatten((args, kwargs))  # torch looks for tensors in the outermost arguments only
    # A saved part of a split tensor is a plain tensor.
    placed = [leaf.placed if isinstance(leaf, SplitTensor) else None for leaf in leaves]
    leaves = [*map(local, leaves)]

    def run(*kept: Any) -> Any:
        nonlocal ran
        args, kwargs = safe_inputs(layer, *tree_unflatten(map(SplitTensor.of, kept, placed), structure))
        if not ran:
            ran = True
            return forward(*args, **kwargs)
        with preserved_random_state(torch.device("cpu")), default_dtype(dtype), ExitStack() as undo:
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)
            for norm in _norms(layer):
                copies = {name: buffer if buffer is None else buffer.clone() for name, buffer in norm._buffers.items()}
                undo.enter_context(replaced(norm, _buffers=copies))
            return forward(*args, **kwargs)

    before = _versions(layer, leaves)
    output = checkpoint(run, *leaves, use_reentrant=False)
    # torch checks this of inputs, in backward, and not at all while hooks on saved tensors are in use.
    for what, *_ in before - _versions(layer, leaves):
        raise RecomputationError(
            f"a {type(layer).__name__} changes its {what} in its forward pass, and activation_checkpointing would "
            "compute it again from what has been changed: let it work on a copy, or leave it out of "
            "activation_checkpointing"
        )
    return output


def works_in_place(layer: Module) -> bool:
    """Whether a part of the layer has a true attribute ``inplace``."""
    return any(getattr(part, "inplace", False) for part in layer.modules())


def safe_inputs(layer: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The layer's arguments, copied if it :func:`works_in_place`."""
    if works_in_place(layer):
        args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
    return args, kwargs


def _norms(layer: Module) -> list[Module]:
    """The parts of a layer that keep statistics, as BatchNorm does."""
    return [part for part in layer.modules() if part._buffers.get("num_batches_tracked") is not None]


def _versions(layer: Module, inputs: Sequence[Any]) -> set[tuple[str, int, int]]:
    """Which tensors, in which version, a second run of the layer finds changed if the first one changes them."""
    norms = _norms(layer)
    buffers = [
        (f"buffer {name!r}", b) for part in layer.modules() if part not in norms for name, b in part._buffers.items()
    ]
    named = [*(("input", each) for each in inputs), *buffers]
    return {(what, id(t), t._version) for what, t in named if isinstance(t, Tensor) and not t.is_inference()}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within the block torch's default dtype is ``dtype``, in all threads; does nothing if it already is."""
    before = torch.get_default_dtype()
    try:
        if before != dtype:  # perhaps set by the thread that started this one
            torch.set_default_dtype(dtype)
        yield
    finally:
        if before != dtype:
            torch.set_default_dtype(before)
