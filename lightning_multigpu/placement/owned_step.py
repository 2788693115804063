"""The step of an optimizer whose parameters have owners: other ranks, the host, or servers.

The user's optimizer object stays what schedulers and callbacks know, with the module's parameters in its groups. Its
``step`` is replaced; a :class:`Transport` does what is different between the families::

                  gradients                 update                   new values
    collective    reduced in backward       OwnedPart on a rank      broadcast
    host          the host's memory         OwnedPart on a rank      the host's memory
    servers       pushed in backward        OwnedPart on a server    pulled
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_multigpu.placement.owned_part import hooks_before


@dataclass(frozen=True)
class Update:
    """What a step asks the owners for; the same on all ranks.

    Attributes:
        is_whole: each ``.grad`` is the average over the ranks already.
        num_changed: how many states user code has changed since the last update.
        clip_norm: the largest norm of all gradients together; None for no limit.
        clip_value: the largest absolute value of an element of a gradient; None for no limit.
    """

    is_whole: bool = False
    num_changed: int = 0
    clip_norm: float | None = None
    clip_value: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class Transport(Protocol):
    """Brings gradients to the owners of parameters, and new values back.

    All methods but :meth:`view` and :meth:`close` are collectives of the ranks.

    Attributes:
        pushes_early: gradients may be sent as soon as backward has them: it completes them, and no hook changes them.
    """

    pushes_early: bool

    def view(self) -> Any:
        """A new ``optimizer.state`` for user code, which follows what that does from now on.

        It has ``take(parameters)``, which returns the new states of those that user code has changed and forgets the
        changes; ``given``, with changed states by parameter that ``take`` has not returned; and ``own``, the states
        that the optimizer has after :meth:`close`.
        """

    def place(self, new: list[Parameter], given: Mapping[Any, Any]) -> None:
        """Finds owners for parameters that the optimizer has got since the last call; called before all else.

        It is called also where there are none. ``given`` are states with which they begin, by parameter.
        """

    def step(self, update: Update) -> None:
        """Has the owners update their parts, and gives all ranks the new values."""

    def states(self) -> dict[int, Any]:
        """States by the number of a parameter: whole ones on rank 0, or each rank's own if ranks gather them later."""

    def load(self, groups: list[dict[str, Any]], states: Mapping[Parameter, Any]) -> None:
        """Loads values of groups, and whole states of parameters; of others there are none."""

    def change(self, states: Mapping[Any, Any]) -> None:
        """Puts whole states of some parameters, often of none, in the place of those that the owners have."""

    def close(self) -> None:
        """Sends nothing from now on."""


T = TypeVar("T", bound=Transport)


class OwnedStep(Generic[T]):
    """A user's optimizer whose ``step`` is replaced until :meth:`close`.

    Making one, steps, saving and loading are collectives of the ranks. Hooks of the step are called around all of it,
    once, as torch calls them: before the closure, and with the module's parameters. Those before the step get averages
    of the gradients that are there. The optimizer's module is the same on all ranks.

    Attributes:
        gradients_are_whole: each ``.grad`` is the average over the ranks already, and the next step takes it as it is.
        clip_norm: the next step clips the gradients to this global norm; None for no clipping.
        clip_value: the next step clips each element of the gradients to this; None for no clipping.
        average: makes each ``.grad`` the average over the ranks, a collective; None where gradients are averages after
            backward, or stay each rank's own.
        average_given: averages gradients that user code has set before each step; None where user code sets none.

    Raises:
        ValueError: the optimizer evaluates the loss itself, several times a step.
    """

    def __init__(self, optimizer: Optimizer, transport: T) -> None:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:  # LBFGS, SAM
            raise ValueError(
                f"{type(optimizer).__name__} evaluates the loss several times within a step (which needs its closure), "
                "and new weights are back only after it: use SGD or Adam, strategy='ring_ddp', or one device"
            )
        self.optimizer = optimizer
        self.transport = transport
        self.gradients_are_whole = False
        self.clip_norm: float | None = None
        self.clip_value: float | None = None
        self.average: Callable[[list[Parameter]], object] | None = None
        self.average_given: Callable[[list[Parameter]], object] | None = None
        self._num_changed = 0
        self._placed: set[Parameter] = set()
        self._view: Any = None
        self._own_step = optimizer.step
        self._had_step = "step" in vars(optimizer)

        @functools.wraps(self._own_step)  # schedulers look for their mark on it
        @torch.no_grad()
        def step(_: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
            return self._step(closure, options)

        with_hooks = Optimizer.profile_hook_step(step)

        @functools.wraps(step)
        def with_averages(_: Optimizer, *arguments: Any, **options: Any) -> Any:
            if any(hooks_before(optimizer)) and not self.gradients_are_whole:
                self.average_gradients()
            return with_hooks(optimizer, *arguments, **options)

        optimizer.step = MethodType(with_averages, optimizer)  # type: ignore[method-assign]

    def _step(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        loss = None
        if closure is not None:
            self.gradients_are_whole = False  # backward adds to them
            with torch.enable_grad():
                loss = closure()
        if self.average_given is not None:
            self.average_given(self._parameters())
            self.gradients_are_whole = True
        self.place_new()
        check_apart(self._parameters())
        self._take_state()
        num_changed, self._num_changed = self._num_changed, 0
        self.transport.step(Update(self.gradients_are_whole, num_changed, self.clip_norm, self.clip_value, options))
        self.gradients_are_whole = False
        self.clip_norm = self.clip_value = None
        return loss

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Has each ``.grad`` averaged for hooks that read it before the step; a collective."""
        if self.average is not None:
            self.average(self._parameters())
            self.gradients_are_whole = True

    def place_new(self) -> None:
        """Finds owners for parameters that have come to the optimizer since; a collective."""
        new = [parameter for parameter in self._parameters() if parameter not in self._placed]
        self._placed.update(new)
        self.transport.place(new, self.optimizer.state if self._view is None else self._view.given)
        if self._view is None:
            for parameter in new:
                self.optimizer.state.pop(parameter, None)

    def close(self) -> None:
        """Gives the optimizer its own ``step`` back, and the states that this process has in the optimizer's place."""
        state: Any = self.optimizer.state
        if self._view is not None and state is self._view:
            self.optimizer.state = self._view.own
        if self._had_step:
            self.optimizer.step = self._own_step  # type: ignore[method-assign]
        else:
            vars(self.optimizer).pop("step", None)
        self.transport.close()

    def _parameters(self) -> list[Parameter]:
        """The parameters of all groups, in the order of a checkpoint."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The state as the whole optimizer would have it on one device; a collective.

        Returns:
            Values of groups, and states of tensors as :meth:`Transport.states` has them.
        """
        self.place_new()
        self._take_state()
        return {**groups_alone(self.optimizer), "state": self.transport.states()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the state of one device's whole optimizer, the same on all ranks, each part where its owner is.

        A collective.

        Raises:
            ValueError: the groups are not those of this optimizer.
        """
        self.place_new()
        groups = state_dict["param_groups"]
        saved, own = ([len(group["params"]) for group in of] for of in (groups, self.optimizer.param_groups))
        if saved != own:
            raise ValueError(
                f"the checkpoint's optimizer has groups of {saved} parameters, and {type(self.optimizer).__name__} has "
                f"{own}: was it saved with another model?"
            )
        numbers = [number for group in groups for number in group["params"]]
        states = zip(self._parameters(), map(state_dict["state"].get, numbers), strict=True)
        self.transport.load(groups, {parameter: state for parameter, state in states if state is not None})
        self.place_new()  # loading has made new groups
        if self._view is not None:
            self._watch()

    # What user code does to the state

    def watch_state(self) -> None:
        """Follows from now on what user code does to ``optimizer.state``; a second call does nothing."""
        if self._view is None:
            self._watch()

    def _watch(self) -> None:
        self._view = self.transport.view()
        self.optimizer.state = self._view

    def _take_state(self) -> None:
        """Carries out what user code has done to the state since the last step; a collective."""
        if self._view is None:
            return
        state: Any = self.optimizer.state
        if state is self._view:
            changes = self._view.take(self._parameters())
        else:  # load_state_dict or the constructor has replaced it, or user code
            changes = {**{parameter: {} for parameter in self._parameters()}, **state}
            self._watch()
        self._num_changed += len(changes)
        self.transport.change(changes)


def check_apart(parameters: Iterable[Parameter]) -> None:
    """Raises ValueError for parameters that begin at the same place in memory: an owner would update copies."""
    listed = [*parameters]
    if len({parameter.data_ptr() for parameter in listed}) == len(listed):
        return  # as nearly always
    places: dict[tuple[Any, int], Parameter] = {}
    for parameter in listed:
        other = places.setdefault((parameter.device, parameter.data_ptr()), parameter)
        if other is not parameter and parameter.numel():
            raise ValueError(
                f"two parameters of shapes {tuple(other.shape)} and {tuple(parameter.shape)} share memory, as after "
                "a.data = b.data, and their owners would update each of them apart: make them one parameter "
                "(self.a.weight = self.b.weight), or use strategy='ring_ddp'"
            )


def groups_alone(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state dictionary without states."""
    held, optimizer.state = optimizer.state, {}  # type: ignore[assignment]
    try:
        return optimizer.state_dict()
    finally:
        optimizer.state = held


def call_on_gradient(parameter: Parameter, hook: Callable[[Parameter], None]) -> RemovableHandle:
    """Has the hook called when backward has the parameter's gradient; a frozen parameter may be unfrozen later."""
    is_trained = parameter.requires_grad
    try:
        handle: RemovableHandle = parameter.requires_grad_().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    finally:
        parameter.requires_grad_(is_trained)
    return handle
