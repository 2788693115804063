"""Activation checkpointing: intermediate results of layers are not saved, but computed again in backward.

Only the input of such a layer is saved. So memory grows with the number of layers, not with their size; the price is
one more forward pass (T. Chen et al., 2016, "Training deep nets with sublinear memory cost", section 4).

``torch.utils.checkpoint.checkpoint`` saves the input, runs a layer again, and restores torch's random states and
autocast. This module chooses the layers, and does what torch does not: a layer's own hooks run once and the layer stays
in its place (torch's ``checkpoint_wrapper`` calls it again with its hooks, and takes its place in the user's module);
the second run has the default dtype and the random numbers of Python and NumPy of the first, BatchNorm counts a batch
once, and parts of split tensors stay parts; layers that change their input or a buffer are refused.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from lightning_multigpu.engine.replaced_attributes import replaced
from lightning_multigpu.engine.step_state import other_random_states, preserved_random_state
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


def selected_layers(module: Module, choice: Choice) -> list[str]:
    """Names of the layers that ``activation_checkpointing=choice`` selects in a module that runs as a whole.

    True selects what is inside of each ``nn.Sequential`` and ``nn.ModuleList`` with parameters; a list selects among
    all submodules. Of nested layers the outer one counts.

    Raises:
        ValueError: nothing is selected, or an entry selects no submodule; the message lists the submodules.
    """
    owner = type(module).__name__
    parts = {name: part for name, part in module.named_modules() if name}
    containers = tuple(
        f"{name}." if name else ""
        for name, part in module.named_modules()
        if isinstance(part, Sequential | ModuleList) and any(True for _ in part.parameters())
    )
    has_forward = {name: not isinstance(part, ModuleList | ModuleDict) for name, part in parts.items()}
    layers = _outermost(name for name in parts if name.startswith(containers) and has_forward[name])
    if choice is True:
        if not layers:
            raise ValueError(
                f"activation_checkpointing=True: no module of {owner} is an nn.Sequential or an nn.ModuleList with "
                f"parameters; pass classes or names of modules, such as {_shown(parts)}"
            )
        return layers
    found = _matching(choice or (), parts, "module", owner, layers or parts)
    return _outermost(name for name in parts if name in found)


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
        ValueError: an entry selects no layer; the message lists the layers.
    """
    named = dict(layers)
    found = named if choice is True else _matching(choice or (), named, "layer", repr(chain), named)
    return frozenset(index for index, name in enumerate(named) if name in found)


def _matching(
    choice: Sequence[str | type], parts: Mapping[str, Module], kind: str, owner: str, shown: Iterable[str]
) -> Collection[str]:
    """The names of the parts that the entries of a choice select; further arguments are for the message."""
    found = set[str]()
    for entry in choice:
        matching = {
            name
            for name, part in parts.items()
            if (entry in (name, type(part).__name__) if isinstance(entry, str) else isinstance(part, entry))
        }
        if not matching:
            text = entry.__name__ if isinstance(entry, type) else repr(entry)
            classes = ", ".join(sorted({type(part).__name__ for part in parts.values()}))
            raise ValueError(
                f"activation_checkpointing=[{text}] names no {kind} of {owner}, whose {kind}s are of the classes "
                f"{classes}, with names such as {_shown(shown)}; pass some of these, or True"
            )
        found |= matching
    return found


def _shown(names: Iterable[str]) -> str:
    listed = [*names]
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return f"{listed[:_SHOWN]}{more}"


class Recomputation:
    """Makes layers of a module compute their forward again in the backward pass.

    Hooks of a layer run once; hooks of the modules inside it run again, as under ``torch.utils.checkpoint``.

    Args:
        in_threads: several threads run copies of the module and share the generators of Python and NumPy, so a layer
            that draws from these is refused.

    Raises:
        ValueError: as for :func:`selected_layers`; or a module around a layer is compiled.
    """

    def __init__(self, module: Module, choice: Choice, *, in_threads: bool = False) -> None:
        self.names = selected_layers(module, choice)
        for name, part in module.named_modules():
            inside = next((each for each in self.names if name and each.startswith(f"{name}.")), None)
            if inside and (part._compiled_call_impl is not None or "_orig_mod" in part._modules):
                raise ValueError(
                    f"{name} is compiled as a whole, and activation_checkpointing runs {inside} inside of it by "
                    "itself: compile each layer with layer.compile(), or leave one of the two out"
                )
        self._choice = choice
        self._in_threads = in_threads
        self._has_run = False
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
    def installed(self, *modules: Module) -> Iterator[None]:
        """Within the block layers run so that backward, also after the block, computes them again.

        Within the block Hugging Face models cache no keys and values: a layer's second run would find its own.

        Args:
            modules: the module, or copies of it with layers of the same names.

        Raises:
            RecomputationError: a layer runs under ``torch.utils.checkpoint``, or changes its input or a buffer.
        """
        with ExitStack() as undo:
            for module in modules:
                for name in self.names:
                    layer = module.get_submodule(name)
                    # torch calls a module's _compiled_call_impl, if set, instead of hooks and forward.
                    attribute = "forward" if layer._compiled_call_impl is None else "_compiled_call_impl"
                    own = vars(layer).get(attribute)
                    undo.enter_context(replaced(layer, **{attribute: partial(self._call, name, layer, own)}))
                for model in caching_models(module):
                    hook = partial(without_cache, "the blocks under activation_checkpointing would find their own keys")
                    undo.callback(model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove)
            yield

    def _call(self, name: str, layer: Module, own: Callable[..., Any] | None, /, *args: Any, **kwargs: Any) -> Any:
        """A call of a layer; ``own`` is its call before, unless it is its class's forward."""
        own = own or type(layer).forward.__get__(layer)  # looked up at each call: a split of the layers changes classes
        if runs_in_checkpoint():
            raise RecomputationError(
                f"{name} is called within torch.utils.checkpoint, and would be computed again twice: leave the "
                "checkpoint around it out, or leave activation_checkpointing out"
            )
        if not torch.is_grad_enabled():
            return own(*args, **kwargs)
        self._has_run = True
        again = (
            _drawing_none if self._in_threads else partial(_drawing_again, random.getstate(), numpy.random.get_state())
        )
        before = {} if name in self._checked else _buffer_versions(layer)
        output = recomputed(layer, own, args, kwargs, again, preserve_rng_state=True)
        if name not in self._checked:
            self._checked.add(name)
            after = _buffer_versions(layer)
            changed = next((buffer for buffer in before if before[buffer] != after.get(buffer)), None)
            if changed is not None:
                raise RecomputationError(
                    f"{name} changes its buffer {changed!r} in its forward pass, and activation_checkpointing would "
                    "compute it again with the changed one, and change it twice: leave it out of "
                    "activation_checkpointing"
                )
        return output


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
        again: the context of the second run, which sets the random states from the start of the first run.
        preserve_rng_state: torch's random states are set without ``again``, and restored after the second run.

    Raises:
        RecomputationError: the layer has changed its input in place, although it has no true attribute ``inplace``.
    """
    dtype = torch.get_default_dtype()
    ran = False
    leaves, structure = tree_flatten((args, kwargs))  # torch looks for tensors in the outermost arguments only
    # A saved part of a split tensor is a plain tensor.
    placed = [leaf.placed if isinstance(leaf, SplitTensor) else None for leaf in leaves]
    leaves = [*map(local, leaves)]

    def run(*kept: Any) -> Any:
        nonlocal ran
        args, kwargs = tree_unflatten(map(SplitTensor.of, kept, placed), structure)
        args, kwargs = safe_inputs(layer, args, kwargs)
        if not ran:
            ran = True
            return forward(*args, **kwargs)
        with again(), default_dtype(dtype), _preserved_statistics(layer):
            return forward(*args, **kwargs)

    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
    versions = [tensor._version for tensor in inputs]
    output = checkpoint(run, *leaves, use_reentrant=False, preserve_rng_state=preserve_rng_state)
    # torch checks this in backward only, and not at all while hooks on saved tensors are in use.
    if [tensor._version for tensor in inputs] != versions:
        raise RecomputationError(
            f"a {type(layer).__name__} changes its input in place, and activation_checkpointing would compute it again "
            "from what has been changed: let it work on a copy, or leave it out of activation_checkpointing"
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


@contextmanager
def _drawing_again(python_state: Any, numpy_state: Any) -> Iterator[None]:
    """Within the block Python and NumPy draw from these states; torch keeps its own."""
    with preserved_random_state(torch.device("cpu")):
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        yield


@contextmanager
def _drawing_none() -> Iterator[None]:
    """Refuses a block that draws from the generators of Python and NumPy."""
    before = other_random_states()
    try:
        yield
    finally:  # torch ends the second run by an exception once it has all tensors
        if other_random_states() != before:
            raise RecomputationError(
                "a layer under activation_checkpointing draws random numbers of Python or NumPy, from generators that "
                "all replicas share: it would draw others when backward computes it again. Leave it out of "
                "activation_checkpointing, or use strategy='ring_ddp'"
            )


def _buffer_versions(layer: Module) -> dict[str, tuple[int, int]]:
    """The buffers of a layer and their versions, without the ones that :func:`_preserved_statistics` preserves."""
    return {
        f"{name}.{key}".removeprefix("."): (id(buffer), buffer._version)
        for name, part in layer.named_modules()
        for key, buffer in part._buffers.items()
        if buffer is not None and not buffer.is_inference() and part._buffers.get("num_batches_tracked") is None
    }


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
    with recomputation.installed(*modules):
        yield
    if (problem := recomputation.without_effect()) is not None:
        warn(problem)
