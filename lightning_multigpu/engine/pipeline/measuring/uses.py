"""Uses of tensors outside of the layers: the stages whose step needs one that their rank lacks, found on trial.

A placeholder stands for what a rank lacks, and what is computed from it is a placeholder too. So a step that needs such
a value ends with an error that names it, or leaves a placeholder in what it returns, logs or keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.pipeline.stages.layer_interception import Activations, LayerInterception
from lightning_multigpu.engine.placeholder import Placeholder, first_placeholder
from lightning_multigpu.engine.step_state import preserved_random_state, seed_of, set_random_state


def lacking(ownership: Ownership, step: Callable[[], Any], left: Callable[[], Any], seed: int) -> dict[str, set[int]]:
    """The tensors outside of the layers that this rank's stages lack, by name, and the parts of a step that need them.

    A collective of the pipeline. Parts are numbered as in :class:`.Chain`. Stages behind one that lacks a tensor do not
    run. Random states are left unchanged.

    Args:
        left: returns further results of the step, such as logged values, in nested containers; called after the last
            stage's step.

    Raises:
        PipelineError: the step cannot be split; or whatever the step raises.
    """
    chain, device = ownership.chain, ownership.device
    outside = [holding for holding in ownership.holdings if holding.is_outside]
    names = {holding.source: holding.name for holding in outside}
    buffers = [(holding, holding.tensor.clone()) for holding in outside if not holding.is_parameter]
    known = {id(holding.tensor) for holding in ownership.holdings}
    draws, uses = _Draws(), dict[str, set[int]]()

    def begin_part(part: int) -> None:
        set_random_state(seed_of(seed, part), device)
        draws.part, draws.lacking = part, ()

    layers = LayerInterception(chain, begin_part)
    with preserved_random_state(device), layers.installed():
        for stage in ownership.stages:
            runs, ended, result, arrived = True, False, None, Activations((), ())
            start, stop = ownership.bounds[stage]
            if start:
                runs, ended = ownership.group.receive_object(ownership.previous)
                if ended:
                    arrived = ownership.group.receive_activations(ownership.previous, device, gradients=True)
                    # Copies, so that a layer may work in place, which autograd forbids on leaves.
                    arrived = Activations(arrived.structure, tuple(tensor.clone() for tensor in arrived.tensors))
            if runs:
                found: set[str] = set()
                try:
                    with draws:
                        ended, result = layers.run((start, stop), step, None if start == 0 else lambda: arrived)  # noqa: B023
                    results = result if ended else left() if stop == len(chain) else ()
                    lost = (each for each in tree_iter(results) if isinstance(each, Placeholder))
                    found.update(*(each.sources for each in lost if id(each) not in known))
                except PipelineError as error:
                    found, ended = set(error.lacking), False
                    if not found & names.keys():
                        raise
                # Every stage runs the part before the layers.
                parts = {draws.part} if draws.part else set(range(len(chain) + 2))
                for source in found & names.keys():
                    uses.setdefault(names[source], set()).update(parts)
                runs = not found & names.keys()
            if stop < len(chain):
                ownership.group.send_object((runs, runs and ended), ownership.following)
                if runs and ended:
                    ownership.group.send_activations(Activations.of(result), ownership.following)
    if ownership.position == 0:  # which alone has the values that the step writes before the layers
        for holding, before in buffers:
            if not torch.equal(before, holding.tensor):
                uses.setdefault(holding.name, set()).add(0)
    ownership.finish()
    return uses


class _Draws(TorchDispatchMode):
    """Refuses random numbers behind those of a placeholder, which draws none: they would be others than elsewhere.

    Attributes:
        part: the running part of the step.
        lacking: the sources of placeholders that should have drawn in this part.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part = 0
        self.lacking: tuple[str, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A traced chain may be tracing arguments of a new kind.
        if not torch.compiler.is_compiling() and torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            lacking = first_placeholder((args, kwargs))
            if lacking is not None:
                self.lacking += lacking.sources
            elif self.lacking:
                raise PipelineError(f"a step draws random numbers behind those of {self.lacking[0]}", self.lacking)
        return func(*args, **kwargs)
