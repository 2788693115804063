"""The part of an optimizer's work that one process owns: pieces of parameters, their states, and their updates.

The optimizer keeps its groups, with the learning rates and all other values of the moment. Within an update the groups
hold the pieces in the place of parameters::

    outside      param_groups: p0 p1 | p2 p3         state: what user code sees
    an update    param_groups: piece of p1 | p2      state: of these pieces
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim import optimizer as hooks_of_all
from torch.utils._pytree import tree_map_only

from lightning_multigpu.placement.norms import scale_to_norm, sum_of_squares
from lightning_multigpu.placement.table import Piece, elements, part_of_state

Groups = Sequence[Sequence[Parameter]]
"""What each group of an optimizer holds."""


class OwnedPart:
    """The pieces of one optimizer that this process updates, with their states.

    A piece has its own memory, or it is the whole parameter itself. The optimizer makes the updates, by the step that
    it has now.

    Attributes:
        pieces: what is updated for a parameter of the module, and which of its elements; a server has no module.
        states: of the pieces; the mapping stays the same.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.pieces: dict[Any, tuple[Parameter, Piece]] = {}
        self.states: defaultdict[Any, Any] = defaultdict(dict)
        self._step = optimizer.step

    def held(self) -> list[list[Parameter]]:
        """The pieces of each group."""
        groups = self.optimizer.param_groups
        return [[self.pieces[p][0] for p in group["params"] if p in self.pieces] for group in groups]

    # An update

    def read(self, parameters: Iterable[Parameter]) -> None:
        """Copies the parameters' weights of now, which a hook may have changed, to pieces that have their own memory.

        Parameters of other owners are left out.
        """
        owned = [(parameter, *self.pieces[parameter]) for parameter in parameters if parameter in self.pieces]
        apart = [(value, elements(parameter, piece)) for parameter, value, piece in owned if value is not parameter]
        if apart:
            torch._foreach_copy_([value for value, _ in apart], [weights for _, weights in apart])

    def update(self, held: Groups, gradients: Mapping[Parameter, Tensor], **options: Any) -> None:
        """The optimizer's own step with these pieces of each group, and without hooks of the step.

        ``gradients`` are those of pieces, for this update only; ``options`` those of the step.
        """
        for value, gradient in gradients.items():
            value.grad = gradient
        try:
            with self._holding(held), _without_hooks(self.optimizer):
                self._step(**options)
        finally:
            for value in gradients:
                value.grad = None

    @contextmanager
    def _holding(self, held: Groups) -> Iterator[None]:
        """Within the block the groups hold these pieces, and the optimizer's state is theirs."""
        optimizer = self.optimizer
        before = [group["params"] for group in optimizer.param_groups]
        outside, optimizer.state = optimizer.state, self.states
        for group, pieces in zip(optimizer.param_groups, held, strict=True):
            group["params"] = [*pieces]
        try:
            yield
        finally:
            found, optimizer.state = optimizer.state, outside
            if found is not self.states:  # loading makes a new mapping, and new groups
                self.states.clear()
                self.states.update(found)
            for group, parameters in zip(optimizer.param_groups, before, strict=True):
                group["params"] = parameters

    # States

    def take_state(self, parameter: Any, state: Any) -> None:
        """Takes the part of a whole state that belongs to the parameter's piece; an empty one removes the piece's."""
        if not isinstance(parameter, Tensor):  # a state of the optimizer as a whole
            self.states[parameter] = state
        elif parameter in self.pieces:
            self.states.pop(self.pieces[parameter][0], None)
            if state:
                self.states[self.pieces[parameter][0]] = self._part_of(parameter, state)

    def take_states(self, states: Mapping[Any, Any]) -> None:
        """As :meth:`take_state`, of several parameters."""
        for parameter, state in states.items():
            self.take_state(parameter, state)

    def clear(self) -> None:
        """Gives all pieces and states up."""
        self.pieces.clear()
        self.states.clear()

    def _part_of(self, parameter: Any, state: Any) -> Any:
        value, piece = self.pieces[parameter]
        found = part_of_state(state, parameter, piece)
        return found if value is parameter else tree_map_only(Tensor, Tensor.cpu, found)

    def numbered_states(self) -> dict[int, Any]:
        """The states of the pieces, by the numbers of their parameters in a checkpoint."""
        parameters = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
        owned = {number: self.pieces[p][0] for number, p in enumerate(parameters) if p in self.pieces}
        return {number: self.states[value] for number, value in owned.items() if value in self.states}

    def load_whole(self, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Any]) -> None:
        """As :meth:`load`, of the states of whole parameters."""
        own = {self.pieces[p][0]: self._part_of(p, state) for p, state in states.items() if p in self.pieces}
        self.load(groups, own, self.held())

    def load(self, groups: Sequence[Mapping[str, Any]], states: Mapping[Parameter, Any], held: Groups) -> None:
        """Has the optimizer load a state dictionary with these values of its groups, and states of its pieces."""
        numbers = {value: number for number, value in enumerate(chain.from_iterable(held))}
        saved = [{**g, "params": [numbers[value] for value in of]} for g, of in zip(groups, held, strict=True)]
        by_number = {numbers[value]: state for value, state in states.items()}
        with self._holding(held):
            self.optimizer.load_state_dict({"state": by_number, "param_groups": saved})


def clip(
    owned: Iterable[Tensor],
    max_value: float | None,
    max_norm: float | None,
    reduce_sum: Callable[[Tensor], Tensor | float],
) -> None:
    """Clips the gradients that this process owns in place, each element to ``max_value`` or all by the common norm.

    None is no limit. ``reduce_sum`` sums over the owners, and is called with ``max_norm`` only.
    """
    gradients = [*owned]
    if max_value is not None:
        for gradient in gradients:
            gradient.clamp_(-max_value, max_value)
    if max_norm is not None:
        scale_to_norm(gradients, max_norm, reduce_sum(sum_of_squares(gradients)))


def hooks_before(optimizer: Optimizer) -> list[dict[int, Any]]:
    """The hooks that torch calls before a step of the optimizer."""
    return [hooks_of_all._global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks]


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Within the block a step calls no hooks."""
    after = [hooks_of_all._global_optimizer_post_hooks, optimizer._optimizer_step_post_hooks]
    kept = [(hooks, dict(hooks)) for hooks in [*hooks_before(optimizer), *after]]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, found in kept:
            hooks.update(found)
