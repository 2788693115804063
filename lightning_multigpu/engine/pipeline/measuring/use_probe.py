"""Use probe: watches a step to find which of its parts use the tensors outside of the layers.

The probe tracks which of these tensors each value before the layers is computed from, on every rank, also if the tensor
is a placeholder. A layer, or the part after the layers, uses such a tensor if it computes with such a value::

    tokens.weight -> embedding -> [0] -> [1] -> [2] -> norm -> head         tokens.weight: before the layers
    bias.weight   -> bias table ---+------+------+                          bias.weight:   before, and layers 0, 1 and 2
                                                                            norm.weight, head.weight: after the layers
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.pipeline.stages.layer_interception import Activations, LayerInterception
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.step_state import preserved_random_state, seed_of, set_random_state

Uses = dict[str, set[int]]
"""The parts of a step that use each tensor, by its name; parts are numbered as in :class:`Chain`."""

_READS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class UseProbe:
    """Watches steps on the stages of one rank."""

    def __init__(self, ownership: Ownership, seed: int) -> None:
        self._ownership = ownership
        self._device = ownership.device
        self._seed = seed
        self._last_part = len(ownership.chain) + 1
        self._watch = _Watch(ownership, self._last_part)
        self._layers = LayerInterception(ownership.chain, self._begin_part, self._run_layer)

    def watch(self, step: Callable[[], Any], left: Callable[[], Any]) -> Uses:
        """The tensors that this rank's stages use; a collective of the pipeline. Random states are left unchanged.

        A step stops where it needs values that the rank lacks; these values count as used.

        Args:
            left: returns further results of the step, such as logged values, in nested containers; called after the
                last stage's step.

        Raises:
            PipelineError: the step cannot be split; or whatever the step raises.
        """
        before = {h.name: h.tensor.clone() for h in self._ownership.holdings if h.is_outside and not h.is_parameter}
        with preserved_random_state(self._device), self._layers.installed():
            for stage in self._ownership.stages:
                self._run_stage(stage, step, left)
        if self._ownership.position == 0:
            tensors = {holding.name: holding.tensor for holding in self._ownership.holdings}
            for name in before:
                if not torch.equal(before[name], tensors[name]):
                    self._watch.uses.setdefault(name, set()).add(0)
        self._ownership.finish()
        return self._watch.uses

    def _run_stage(self, stage: int, step: Callable[[], Any], left: Callable[[], Any]) -> None:
        ownership = self._ownership
        start, stop = ownership.bounds[stage]

        @functools.cache
        def receive() -> Activations:
            group, previous = ownership.group, ownership.previous
            if not group.receive_object(previous):
                raise _Abandoned
            found = group.receive_activations(previous, self._device, gradients=True)
            # Copies, so that a layer may work in place, which autograd forbids on leaves.
            return Activations(found.structure, tuple(tensor.clone() for tensor in found.tensors))

        output = None
        self._watch.runs_first_stage = start == 0
        try:
            with self._watch:
                ended, result = self._layers.run((start, stop), step, None if start == 0 else receive)
            if ended:
                output = Activations.of(result)
            elif stop == len(ownership.chain):
                self._watch.take((result, self._watch.left_in(left())), self._last_part)
            if start:
                receive()  # also where the step has run no layer
        except _Abandoned:
            pass
        except PipelineError as error:
            if not self._watch.lacks(error.lacking):
                raise
            if start:
                with suppress(_Abandoned):
                    receive()
        if stop < len(ownership.chain):
            ownership.group.send_object(output is not None, ownership.following)
            if output is not None:
                ownership.group.send_activations(output, ownership.following)

    def _begin_part(self, part: int) -> None:
        set_random_state(seed_of(self._seed, part), self._device)
        self._watch.part = part

    def _run_layer(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._watch.take((args, kwargs), 1 + index)
        output = forward(*args, **kwargs)
        self._watch.part = 0  # between two layers steps compute as before the first
        self._watch.computed(output)
        return output


class _Abandoned(BaseException):
    """Raised through the user's step if the previous stage has not run to its end."""


class _Watch(TorchDispatchMode):
    """Notes which parts of a step compute with tensors outside of the layers, or with values computed from them.

    Attributes:
        part: the running part of the step; 0 also between the layers.
        runs_first_stage: this stage itself uses the values that are computed before the layers.
    """

    supports_higher_order_operators = True

    def __init__(self, ownership: Ownership, last_part: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part = 0
        self.runs_first_stage = False
        self.uses: Uses = {}
        self._last_part = last_part
        outside = [holding for holding in ownership.holdings if holding.is_outside]
        self._by_source = {holding.source: {holding.name} for holding in outside}
        self._by_storage = {
            _storage(h.tensor): {h.name} for h in outside if h.is_parameter and not isinstance(h.tensor, Placeholder)
        }
        self._outside = {id(holding.tensor) for holding in outside}
        self._kept: list[torch.UntypedStorage] = []  # kept alive, so that no other tensor gets the same memory
        self._drawn: set[str] = set()

    def take(self, value: Any, part: int) -> None:
        """Notes that a part of the step uses the tensors within nested containers."""
        self._note(self._names(value), {part})

    def lacks(self, sources: Iterable[str]) -> bool:
        """Notes that the running part needs values of placeholders; False if none of their sources is outside."""
        names = {name for source in sources for name in self._by_source.get(source, ())}
        self._note(names, {self.part} if self.part else range(1 + self._last_part))
        return bool(names)

    def left_in(self, value: Any) -> list[Tensor]:
        """The tensors within nested containers, but for the tensors outside of the layers themselves."""
        found = (entry for entry in tree_iter(value) if isinstance(entry, Tensor))
        return [tensor for tensor in found if id(tensor) not in self._outside]

    def computed(self, output: Any) -> None:
        """Forgets where a layer's output, perhaps its changed input, comes from: the next stage receives its values."""
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor) and torch._C._has_storage(tensor):
                self._by_storage.pop(_storage(tensor), None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # a traced chain traces arguments of a new kind
            return func(*args, **kwargs)
        names = self._names((args, kwargs))
        if self.part:
            self._note(names, {self.part})
            return func(*args, **kwargs)
        if names and self.runs_first_stage:
            self._note(names, {0})
        if isinstance(func, torch._ops.OpOverload):
            self._note(self._needed_everywhere(func, args, names), range(1 + self._last_part))
        results = func(*args, **kwargs)
        if names:
            for tensor in tree_iter(results):
                if isinstance(tensor, Tensor) and not isinstance(tensor, Placeholder):
                    self._by_storage.setdefault(_storage(tensor), set()).update(names)
                    self._kept.append(tensor.untyped_storage())
        return results

    def _needed_everywhere(self, func: Any, args: Any, names: set[str]) -> set[str]:
        """The tensors whose values every stage needs, since else an operation before the layers would differ."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            if names:  # a placeholder draws no random numbers: what is drawn later would differ
                self._drawn |= names
                return set()
            return self._drawn
        changes_another = func._schema.is_mutable and args and not self._names(args[0])
        return names if changes_another or any(tag in func.tags for tag in _READS_VALUES) else set()

    def _note(self, names: Iterable[str], parts: Iterable[int]) -> None:
        for name in names:
            self.uses.setdefault(name, set()).update(parts)

    def _names(self, value: Any) -> set[str]:
        """The tensors outside of the layers that a value comes from."""
        found: set[str] = set()
        for tensor in tree_iter(value):
            if isinstance(tensor, Placeholder):
                found.update(*(self._by_source.get(source, ()) for source in tensor.sources))
            elif isinstance(tensor, Tensor) and torch._C._has_storage(tensor):
                found.update(self._by_storage.get(_storage(tensor), ()))
        return found


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
