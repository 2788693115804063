"""The base of optimizers whose step is made elsewhere: in shards on the host, or by servers."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim import optimizer as hooks_of_all
from torch.utils.hooks import RemovableHandle

from lightning_multigpu.engine.data_parallel.given_gradients import GivenGradients
from lightning_multigpu.engine.optimizer_state import StateElsewhere, groups_alone, release
from lightning_multigpu.placement.optimizer_split import Split, split_of


class RedirectedOptimizer(ABC):
    """An optimizer of the user's whose ``step`` is replaced until :meth:`close`.

    Hooks of the step are called around all of it, once, as torch calls them: before the closure, and with the module's
    parameters. Those before the step get averages of the gradients that are there.

    Args:
        optimizer: of a module that is the same on all ranks.
        split: what may be divided; by default, what the class of the optimizer allows.

    Attributes:
        gradients_are_whole: each ``.grad`` is the average over the ranks already, and the next step takes it as it is.
        clip_norm: the next step clips the gradients to this global norm; None for no clipping.
        clip_value: the next step clips each element of the gradients to this; None for no clipping.
        given: averages gradients that user code has set before each step; None where user code sets none.
        pushes_early: gradients are pushed as soon as backward has them. For a backward pass whose gradients are
            complete, and that no hook changes.

    Raises:
        ValueError: the optimizer evaluates the loss itself, several times a step.
    """

    def __init__(self, optimizer: Optimizer, split: Split | None) -> None:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:  # LBFGS, SAM
            raise ValueError(
                f"{type(optimizer).__name__} evaluates the loss several times within a step (which needs its closure), "
                "and new weights are back only after it: use SGD or Adam, strategy='ring_ddp', or one device"
            )
        self.optimizer = optimizer
        self.gradients_are_whole = False
        self.clip_norm: float | None = None
        self.clip_value: float | None = None
        self.given: GivenGradients | None = None
        self.pushes_early = False
        self._split = split or split_of(optimizer)
        self._watched: StateElsewhere | None = None
        self._own_step = optimizer.step
        self._had_step = "step" in vars(optimizer)

        @functools.wraps(self._own_step)  # schedulers look for their mark on it
        @torch.no_grad()
        def step(_: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
            loss = None
            if closure is not None:
                self.gradients_are_whole = False  # backward adds to them
                with torch.enable_grad():
                    loss = closure()
            if self.given is not None:
                self.given.average(self._parameters())
                self.gradients_are_whole = True
            self._place_new()
            self._take_state()
            self._step(**options)
            self.gradients_are_whole = False
            self.clip_norm = self.clip_value = None
            return loss

        with_hooks = Optimizer.profile_hook_step(step)

        @functools.wraps(step)
        def with_averages(_: Optimizer, *arguments: Any, **options: Any) -> Any:
            if any(_hooks_before(optimizer)) and not self.gradients_are_whole:
                with torch.no_grad():
                    self.average_gradients()
            return with_hooks(optimizer, *arguments, **options)

        optimizer.step = MethodType(with_averages, optimizer)  # type: ignore[method-assign]

    def close(self) -> None:
        """Gives the optimizer its own ``step`` back, and the states that this process has in the optimizer's place."""
        release([self.optimizer])
        if self._had_step:
            self.optimizer.step = self._own_step  # type: ignore[method-assign]
        else:
            vars(self.optimizer).pop("step", None)

    def _update(self, **options: Any) -> None:
        """The optimizer's own step with what its groups hold now, and without hooks."""
        optimizer = self.optimizer
        after = [hooks_of_all._global_optimizer_post_hooks, optimizer._optimizer_step_post_hooks]
        kept = [(hooks, dict(hooks)) for hooks in [*_hooks_before(optimizer), *after]]
        for hooks, _ in kept:
            hooks.clear()
        try:
            self._own_step(**options)
        finally:
            for hooks, found in kept:
                hooks.update(found)

    @abstractmethod
    def average_gradients(self) -> None:
        """Makes each ``.grad`` the average over the ranks, for hooks that read it before the step; a collective."""

    @abstractmethod
    def _step(self, *arguments: Any, **options: Any) -> None:
        """Does what replaces ``optimizer.step``; a collective."""

    @abstractmethod
    def _place_new(self) -> None:
        """Finds a place for parameters that have come to the optimizer since; a collective."""

    @abstractmethod
    def _load(self, saved_groups: list[dict[str, Any]], saved_state: Mapping[int, Any]) -> None:
        """Loads what :meth:`load_state_dict` has checked."""

    def _parameters(self) -> list[Parameter]:
        """The parameters of all groups, in the order of a checkpoint."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the state of a whole optimizer, each part where its shard is; a collective.

        Args:
            state_dict: as one device's optimizer returns it; the same on all ranks.

        Raises:
            ValueError: the groups are not those of this optimizer.
        """
        self._place_new()
        groups = state_dict["param_groups"]
        saved, own = ([len(group["params"]) for group in of] for of in (groups, self.optimizer.param_groups))
        if saved != own:
            raise ValueError(
                f"the checkpoint's optimizer has groups of {saved} parameters, and {type(self.optimizer).__name__} has "
                f"{own}: was it saved with another model?"
            )
        self._load(groups, state_dict["state"])
        if self._watched is not None:
            self.watch_state()

    # What user code does to the state

    def watch_state(self) -> None:
        """Follows from now on what user code does to ``optimizer.state``, and raises where it reads values there."""
        self._watched = StateElsewhere(type(self.optimizer).__name__)
        self.optimizer.state = self._watched  # type: ignore[assignment]

    def _given_states(self) -> MutableMapping[Any, Any]:
        """States that the optimizer's constructor or user code has put in place, by parameter."""
        state: Any = self.optimizer.state
        return state.given if isinstance(state, StateElsewhere) else state

    def _take_state(self) -> None:
        """Carries out what user code has done to the state since the last step; a collective."""
        state: Any = self.optimizer.state
        if self._watched is None:
            return
        if state is self._watched:
            changes = self._watched.take(self._parameters())
        else:  # load_state_dict or the constructor has replaced it, or user code
            changes = {parameter: state.get(parameter, {}) for parameter in self._parameters()}
            self.watch_state()
        self._change_state(changes)

    @abstractmethod
    def _change_state(self, changes: Mapping[Parameter, Mapping[str, Any]]) -> None:
        """Puts the states of some parameters in place, where they are; often of none. A collective."""

    def groups_alone(self) -> dict[str, Any]:
        """The optimizer's state dictionary without states."""
        return groups_alone(self.optimizer)


def _hooks_before(optimizer: Optimizer) -> list[dict[int, Any]]:
    return [hooks_of_all._global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks]


def call_on_gradient(parameter: Parameter, hook: Callable[[Parameter], None]) -> RemovableHandle:
    """Has the hook called when backward has the parameter's gradient; a frozen parameter may be unfrozen later."""
    is_trained = parameter.requires_grad
    try:
        handle: RemovableHandle = parameter.requires_grad_().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    finally:
        parameter.requires_grad_(is_trained)
    return handle


def part_of(value: Any, parameter: Tensor, start: int, stop: int) -> Any:
    """The part of a value of a parameter's state that belongs to elements ``start`` to ``stop``, in host memory."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == parameter.shape and stop - start < value.numel():
        value = value.reshape(-1)[start:stop].clone()
    return value.cpu()
