"""Activation checkpointing: layers whose intermediate results are not saved, but computed again in backward.

Only the input of such a layer is saved, so a stage's memory grows with the number of its layers, not with their inside;
the price is one more forward pass (T. Chen et al., 2016, "Training deep nets with sublinear memory cost", section 4).
``torch.utils.checkpoint`` does the work; this module adds what a pipeline needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lightning_multigpu.engine.pipeline.errors import PipelineError
from lightning_multigpu.engine.pipeline.splitting.chain import Chain
from lightning_multigpu.engine.pipeline.stages.layer_interception import map_only


def recomputed(
    layer: Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    set_random_state: Callable[[], None],
) -> Any:
    """Returns ``forward(*args, **kwargs)``, whose backward pass runs ``forward`` again.

    The second run draws the same random numbers, has the same default dtype, takes an input that no operation in place
    has changed, and does not count its batch in BatchNorm's statistics. Other buffers that a layer changes in its
    forward pass are changed twice.

    Args:
        layer: the layer.
        forward: its own forward.
        set_random_state: sets the random states at the beginning of the layer.

    Raises:
        PipelineError: the layer has changed its input in place, and has no attribute ``inplace`` that says so.
    """
    dtype = torch.get_default_dtype()
    ran = False

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal ran
        args, kwargs = safe_inputs(layer, args, kwargs)
        if not ran:
            ran = True
            return forward(*args, **kwargs)
        set_random_state()
        with _default_dtype(dtype), _preserved_statistics(layer):
            return forward(*args, **kwargs)

    leaves, structure = tree_flatten((args, kwargs))  # torch looks for tensors in the outermost arguments only
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
    versions = [tensor._version for tensor in inputs]
    # torch would restore its own random states only; a layer may draw Python's as well.
    output = checkpoint(
        lambda *kept: run(*tree_unflatten(kept, structure)), *leaves, use_reentrant=False, preserve_rng_state=False
    )
    # torch notices this in backward, and not at all while hooks on saved tensors are in use.
    if [tensor._version for tensor in inputs] != versions:
        raise PipelineError(
            f"a {type(layer).__name__} changes its input in place, and activation_checkpointing would compute it again "
            "from what has been changed: let it work on a copy, or leave it out of activation_checkpointing"
        )
    return output


def safe_inputs(layer: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The layer's arguments, copied if an attribute of the layer says that it works in place."""
    if any(getattr(part, "inplace", False) for part in layer.modules()):
        args, kwargs = map_only(Tensor, torch.clone, (args, kwargs))
    return args, kwargs


def layers_of(chain: Chain, choice: bool | Sequence[str | type]) -> frozenset[int]:
    """The indices of the layers that ``activation_checkpointing=choice`` selects.

    Args:
        choice: all or none; or classes, names of classes ("Block") and names of layers ("blocks.3").

    Raises:
        ValueError: an entry selects no layer; the message lists the layers.
    """
    if isinstance(choice, bool):
        return frozenset(range(len(chain))) if choice else frozenset()
    found: set[int] = set()
    for entry in choice:
        matching = {index for index in range(len(chain)) if _matches(chain, index, entry)}
        if not matching:
            kinds = ", ".join(sorted({type(layer).__name__ for layer in chain.layers}))
            name = entry.__name__ if isinstance(entry, type) else repr(entry)
            raise ValueError(
                f"activation_checkpointing=[{name}] names no layer of {chain.name!r}, whose layers are of the classes "
                f"{kinds}, from {chain.layer_name(0)!r} to {chain.layer_name(len(chain) - 1)!r}; pass some of these, "
                "or True for all layers"
            )
        found |= matching
    return frozenset(found)


def _matches(chain: Chain, index: int, entry: str | type) -> bool:
    if isinstance(entry, str):
        return entry in (type(chain.layers[index]).__name__, chain.layer_name(index))
    return isinstance(chain.layers[index], entry)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
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
