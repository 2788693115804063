"""Activation checkpointing: intermediate results of layers are not saved, but computed again in backward.

Only the input of such a layer is saved. So memory grows with the number of layers, not with their size; the price is
one more forward pass (T. Chen et al., 2016, "Training deep nets with sublinear memory cost", section 4).
``torch.utils.checkpoint`` does the work; this module adds checks, and makes users' layers compute the same again.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList, Sequential
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.hugging_face import caching_models, without_cache
from lightning_multigpu.engine.tensor_split.parts import SplitTensor, local

Choice = bool | Sequence[str | type]
"""All or no layers; or classes, names of classes ("Block") and names of layers ("blocks.3")."""

_SHOWN = 6  # names in an error


class RecomputationError(PipelineError):
    """A layer that cannot be computed again in backward."""


def check_choice(choice: object) -> None:
    """Checks the form of ``activation_checkpointing=choice``.

    Raises:
        ValueError: it is neither a bool nor a list of classes and names.
    """
    given = f"activation_checkpointing={choice!r}"
    if isinstance(choice, bool):
        return
    if isinstance(choice, str) or not isinstance(choice, Sequence):
        raise ValueError(
            f"{given} is neither a bool nor a list; pass True for all layers, or a list of their classes or names, "
            "such as ['Block']"
        )
    if not all(isinstance(entry, str | type) for entry in choice):
        raise ValueError(f"{given}: pass classes, names of classes, or names of layers only")


def runs_in_checkpoint() -> bool:
    """Whether the caller runs within ``torch.utils.checkpoint``."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != torch.utils.checkpoint.__file__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def layers_in(module: Module) -> dict[str, Module]:
    """The layers that ``activation_checkpointing=True`` selects in a module that runs as a whole, by name.

    These are the children of each ``nn.Sequential`` and ``nn.ModuleList`` with parameters; of nested containers the
    outer one counts.
    """

    def found(part: Module, prefix: str, *, inside: bool) -> Iterator[tuple[str, Module]]:
        for name, child in part.named_children():
            path = f"{prefix}{name}"
            if inside and not isinstance(child, ModuleList | ModuleDict):  # those have no forward of their own
                yield path, child
            else:
                is_container = isinstance(child, Sequential | ModuleList) and any(True for _ in child.parameters())
                yield from found(child, f"{path}.", inside=inside or is_container)

    return dict(found(module, "", inside=isinstance(module, Sequential | ModuleList)))


def selected_layers(module: Module, choice: Choice) -> list[str]:
    """Names of the layers that ``activation_checkpointing=choice`` selects in a module that runs as a whole.

    Of nested layers the outer one counts.

    Args:
        module: the whole module.
        choice: True, for :func:`layers_in`, or a list, which selects among all submodules.

    Raises:
        ValueError: nothing is selected, or an entry selects no submodule; the message lists the submodules.
    """
    layers, owner = layers_in(module), type(module).__name__
    if choice is True:
        if not layers:
            raise ValueError(
                f"activation_checkpointing=True: no module of {owner} is an nn.Sequential or an nn.ModuleList with "
                f"parameters; pass classes or names of modules, such as {_shown(_parts(module))}"
            )
        return list(layers)
    parts = _parts(module)
    found = set[str]()
    for entry in choice or ():
        matching = {name for name, part in parts.items() if _matches(name, part, entry)}
        if not matching:
            kinds = ", ".join(sorted({type(part).__name__ for part in parts.values()}))
            raise ValueError(
                f"activation_checkpointing=[{_text(entry)}] names no module of {owner}, whose modules are of the "
                f"classes {kinds}, with names such as {_shown(layers or parts)}; pass some of these, or True"
            )
        found |= matching
    return [name for name in parts if name in found and not any(name.startswith(f"{outer}.") for outer in found)]


def _check_not_compiled(module: Module, names: Sequence[str]) -> None:
    for name, part in module.named_modules():
        inside = next((each for each in names if name and each.startswith(f"{name}.")), None)
        if inside and (part._compiled_call_impl is not None or "_orig_mod" in part._modules):
            raise ValueError(
                f"{name} is compiled as a whole, and activation_checkpointing runs {inside} inside of it by itself: "
                "compile each layer with layer.compile(), or leave one of the two out"
            )


def layers_of(chain: str, layers: Sequence[tuple[str, Module]], choice: Choice) -> frozenset[int]:
    """The indices of the layers of a pipeline that ``activation_checkpointing=choice`` selects.

    Args:
        chain: the name of the layers' container, for the message.
        layers: each with its name.
        choice: all or no layers, or a list of classes and names.

    Raises:
        ValueError: an entry selects no layer; the message lists the layers.
    """
    if isinstance(choice, bool):
        return frozenset(range(len(layers))) if choice else frozenset()
    found: set[int] = set()
    for entry in choice:
        matching = {index for index, (name, layer) in enumerate(layers) if _matches(name, layer, entry)}
        if not matching:
            kinds = ", ".join(sorted({type(layer).__name__ for _, layer in layers}))
            raise ValueError(
                f"activation_checkpointing=[{_text(entry)}] names no layer of {chain!r}, whose layers are of the "
                f"classes {kinds}, from {layers[0][0]!r} to {layers[-1][0]!r}; pass some of these, or True for all "
                "layers"
            )
        found |= matching
    return frozenset(found)


class Recomputation:
    """Makes layers of a module compute their forward again in the backward pass.

    Hooks of a layer run once; hooks of the modules inside it run again, as under ``torch.utils.checkpoint``.

    Args:
        module: the whole module.
        choice: the layers.
        in_threads: several threads run copies of the module and share the generators of Python and NumPy, so a layer
            that draws from these is refused.

    Attributes:
        names: the layers' names.

    Raises:
        ValueError: as for :func:`selected_layers`; or a module around a layer is compiled.
    """

    def __init__(self, module: Module, choice: Choice, *, in_threads: bool = False) -> None:
        self.names = selected_layers(module, choice)
        _check_not_compiled(module, self.names)
        self._choice = choice
        self._has_run = False
        self._keep = _no_random_numbers if in_threads else _random_numbers
        self._checked: set[str] = set()

    def without_effect(self) -> str | None:
        """A warning after the first step if none of the layers has run with gradients; None otherwise, and later."""
        if self._has_run:
            return None
        self._has_run = True
        return (
            f"activation_checkpointing={self._choice!r} has no effect: the first training step calls none of "
            f"{', '.join(self.names[:3])} with gradients; name modules that it calls"
        )

    @contextmanager
    def installed(self, module: Module) -> Iterator[None]:
        """Within the block layers run so that backward, also after the block, computes them again.

        Within the block Hugging Face models cache no keys and values: a layer's second run would find its own.

        Args:
            module: the module, or a copy with layers of the same names.

        Raises:
            RecomputationError: a layer runs under ``torch.utils.checkpoint``, or changes its input or a buffer.
        """
        with ExitStack() as undo:
            for name in self.names:
                undo.enter_context(self._patched(name, module.get_submodule(name)))
            for model in caching_models(module):
                hook = partial(without_cache, "the blocks under activation_checkpointing would find their own keys")
                undo.callback(model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove)
            yield

    @contextmanager
    def _patched(self, name: str, layer: Module) -> Iterator[None]:
        # torch calls a module's _compiled_call_impl, if set, instead of hooks and forward.
        table, attribute = vars(layer), "forward" if layer._compiled_call_impl is None else "_compiled_call_impl"
        before = table.get(attribute)

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Looked up at each call: a split of the layers changes classes.
            own = type(layer).forward.__get__(layer) if before is None else before
            if runs_in_checkpoint():
                raise RecomputationError(
                    f"{name} is called within torch.utils.checkpoint, and would be computed again twice: leave the "
                    "checkpoint around it out, or leave activation_checkpointing out"
                )
            if not torch.is_grad_enabled():
                return own(*args, **kwargs)
            self._has_run = True
            begin = self._keep()
            values = {} if name in self._checked else _buffer_versions(layer)
            output = recomputed(layer, own, args, kwargs, begin, preserve_rng_state=True)
            if name not in self._checked:
                self._checked.add(name)
                _check_buffers(name, layer, values)
            return output

        table[attribute] = forward
        try:
            yield
        finally:
            if before is None:
                table.pop(attribute, None)
            else:
                table[attribute] = before


def recomputed(
    layer: Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    again: Callable[[], AbstractContextManager[Any]],
    *,
    preserve_rng_state: bool = False,
) -> Any:
    """Returns ``forward(*args, **kwargs)``, whose backward pass runs ``forward`` again.

    The second run has the same default dtype and an unchanged input, and does not update BatchNorm's statistics. Other
    buffers that a layer changes in its forward pass are changed twice.

    Args:
        layer: the layer.
        forward: the layer's own forward.
        again: the context of the second run, which sets the random states from the start of the first run.
        preserve_rng_state: torch's random states are set without ``again``, and restored after the second run.

    Raises:
        RecomputationError: the layer has changed its input in place, although it has no true attribute ``inplace``.
    """
    dtype = torch.get_default_dtype()
    ran = False

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal ran
        args, kwargs = safe_inputs(layer, args, kwargs)
        if not ran:
            ran = True
            return forward(*args, **kwargs)
        with again(), default_dtype(dtype), _preserved_statistics(layer):
            return forward(*args, **kwargs)

    leaves, structure = tree_flatten((args, kwargs))  # torch looks for tensors in the outermost arguments only
    placed = [
        leaf.placed if isinstance(leaf, SplitTensor) else None for leaf in leaves
    ]  # a saved part is a plain tensor
    leaves = [*map(local, leaves)]
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
    versions = [tensor._version for tensor in inputs]
    output = checkpoint(
        lambda *kept: run(*tree_unflatten(map(SplitTensor.again, kept, placed), structure)),
        *leaves,
        use_reentrant=False,
        preserve_rng_state=preserve_rng_state,
    )
    # torch checks this in backward only, and not at all while hooks on saved tensors are in use.
    if [tensor._version for tensor in inputs] != versions:
        raise RecomputationError(
            f"a {type(layer).__name__} changes its input in place, and activation_checkpointing would compute it again "
            "from what has been changed: let it work on a copy, or leave it out of activation_checkpointing"
        )
    return output


def safe_inputs(layer: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The layer's arguments, copied if a part of the layer has a true attribute ``inplace``."""
    if any(getattr(part, "inplace", False) for part in layer.modules()):
        args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
    return args, kwargs


def _parts(module: Module) -> dict[str, Module]:
    return {name: part for name, part in module.named_modules() if name}


def _matches(name: str, layer: Module, entry: str | type) -> bool:
    return entry in (type(layer).__name__, name) if isinstance(entry, str) else isinstance(layer, entry)


def _text(entry: str | type) -> str:
    return entry.__name__ if isinstance(entry, type) else repr(entry)


def _shown(names: Mapping[str, Module]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{[*names][:_SHOWN]}{more}"


def _random_numbers() -> Callable[[], AbstractContextManager[None]]:
    """The random states of Python and NumPy; torch keeps its own."""
    states = random.getstate(), numpy.random.get_state()

    @contextmanager
    def drawn_again() -> Iterator[None]:
        before = random.getstate(), numpy.random.get_state()
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        try:
            yield
        finally:
            random.setstate(before[0])
            numpy.random.set_state(before[1])

    return drawn_again


def _no_random_numbers() -> Callable[[], AbstractContextManager[None]]:
    """Refuses a second run that draws from the generators of Python and NumPy."""

    @contextmanager
    def drawing_none() -> Iterator[None]:
        before = random.getstate(), numpy.random.get_state(legacy=False)
        try:
            yield
        finally:  # torch ends the second run by an exception once it has all tensors
            if random.getstate() != before[0] or not _is_same(numpy.random.get_state(legacy=False), before[1]):
                raise RecomputationError(
                    "a layer under activation_checkpointing draws random numbers of Python or NumPy, from generators "
                    "that all replicas share: it would draw others when backward computes it again. Leave it out of "
                    "activation_checkpointing, or use strategy='ring_ddp'"
                )

    return drawing_none


def _is_same(first: Any, second: Any) -> bool:
    """Whether two states of NumPy's generator are the same."""
    places = [(state["state"]["pos"], state["has_gauss"]) for state in (first, second)]
    return places[0] == places[1] and bool(numpy.array_equal(first["state"]["key"], second["state"]["key"]))


def _buffer_versions(layer: Module) -> dict[str, tuple[Tensor, int]]:
    """The buffers of a layer with their versions, without the ones that :func:`_preserved_statistics` preserves."""
    return {
        f"{name}.{key}".removeprefix("."): (buffer, buffer._version)
        for name, part in layer.named_modules()
        for key, buffer in part._buffers.items()
        if buffer is not None and not buffer.is_inference() and part._buffers.get("num_batches_tracked") is None
    }


def _check_buffers(name: str, layer: Module, before: Mapping[str, tuple[Tensor, int]]) -> None:
    for buffer, (value, version) in _buffer_versions(layer).items():
        if buffer in before and (before[buffer][0] is not value or before[buffer][1] != version):
            raise RecomputationError(
                f"{name} changes its buffer {buffer!r} in its forward pass, and activation_checkpointing would compute "
                "it again with the changed one, and change it twice: leave it out of activation_checkpointing"
            )


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within the block torch's default dtype is ``dtype``, in all threads; does nothing if it already is."""
    before = torch.get_default_dtype()
    if before == dtype:  # perhaps set by the thread that started this one
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _preserved_statistics(layer: Module) -> Iterator[None]:
    """Lets BatchNorm update copies of its running statistics within the block."""
    norms = [part for part in layer.modules() if part._buffers.get("num_batches_tracked") is not None]
    before = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        for name, buffer in norm._buffers.items():
            norm._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for norm, buffers in zip(norms, before, strict=True):
            norm._buffers.update(buffers)


@contextmanager
def recomputing(
    recomputation: Recomputation | None, modules: Iterable[Module], warn: Callable[[str], object]
) -> Iterator[None]:
    """Within the block, a training step, layers of the modules run as in :meth:`Recomputation.installed`."""
    if recomputation is None:
        yield
        return
    with ExitStack() as undo:
        for module in modules:
            undo.enter_context(recomputation.installed(module))
        yield
    if (problem := recomputation.without_effect()) is not None:
        warn(problem)
