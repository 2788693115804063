"""Optimizer probe: whether an optimizer's update of one parameter depends on other parameters.

A stage of a pipeline has only the gradients of its own parameters. An optimizer that clips by the norm of all
gradients, or divides by it, would make another step on each stage.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

_STEPS = 2
_FACTORS = (1e-4, 1e4)
_torchs = (value for value in vars(torch.optim).values() if isinstance(value, type) and issubclass(value, Optimizer))
_KNOWN = {inspect.unwrap(cls.step) for cls in _torchs if cls not in (Optimizer, LBFGS)}


class ProbeError(Exception):
    """The optimizer cannot be probed."""


def couples_parameters(optimizer: Any) -> bool:
    """Whether the optimizer changes a parameter by the values or gradients of others.

    torch's optimizers but LBFGS, and subclasses with their ``step``, are known not to. A copy of another one takes
    a few steps: its parameters have 2 numbers in each dimension, and every second one has small or large gradients.

    Args:
        optimizer: has ``param_groups`` and ``step``; it is not changed.

    Raises:
        ProbeError: the copy cannot be made, or fails; or hooks around ``step`` may use the original parameters.
    """
    hooks = any(vars(optimizer).get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post"))
    step = vars(optimizer).get("step")
    is_replaced = step is not None and not getattr(step, "_wrapped_by_lr_sched", False)  # and not by a scheduler
    if inspect.unwrap(type(optimizer).step) in _KNOWN and not hooks and not is_replaced:
        return False
    if isinstance(optimizer, LBFGS):
        return True
    if is_replaced:
        raise ProbeError("its step has been replaced")
    failures: list[Exception] = []
    with torch.random.fork_rng(devices=[]):
        for with_closure in (True, False):
            try:
                expected = _updated(optimizer, 0, 1.0, with_closure)
                for kept, factor in itertools.product((0, 1), _FACTORS):
                    found = _updated(optimizer, kept, factor, with_closure)
                    if not all(torch.equal(a, b) for a, b in list(zip(found, expected, strict=True))[kept::2]):
                        return True
            except Exception as error:  # any class may come from the optimizer
                failures.append(error)
    if len(failures) == 2:
        raise ProbeError(f"{type(failures[0]).__name__}: {failures[0]}") from failures[0]
    if hooks:
        raise ProbeError("it has hooks around its step")
    return False


def _updated(optimizer: Any, kept: int, factor: float, with_closure: bool) -> list[Tensor]:
    """The parameters of a copy after a few steps; those of index ``kept`` modulo 2 are the same for every factor."""
    generator = torch.Generator().manual_seed(0)
    torch.default_generator.manual_seed(0)  # that of the CPU alone, whose state the caller keeps
    memo: dict[int, Any] = {}
    tiny: list[Parameter] = []
    slopes: list[Tensor] = []
    for parameter in dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]):
        scale = 1.0 if len(tiny) % 2 == kept else factor
        values = torch.randn((2, *[2] * parameter.ndim), generator=generator, dtype=torch.float64)
        slopes.append(scale * values[1])
        memo[id(parameter)] = Parameter((1.0 if scale == 1.0 else 3.0) * values[0])
        tiny.append(memo[id(parameter)])
        for state in optimizer.state.get(parameter, {}).values():
            if isinstance(state, Tensor) and state.shape == parameter.shape:
                memo[id(state)] = torch.zeros_like(tiny[-1])
    stepping = _copied(optimizer, memo)

    def closure() -> Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for parameter, slope in zip(tiny, slopes, strict=True):
            parameter.grad = 0.5 * parameter.detach() + slope
            loss = loss + (0.25 * parameter.detach().square() + slope * parameter.detach()).sum()
        return loss

    for _ in range(_STEPS):
        closure()
        stepping.step(closure) if with_closure else stepping.step()
    return [parameter.detach() for parameter in tiny]


def _copied(optimizer: Any, memo: dict[int, Any]) -> Any:
    """A copy with the parameters of ``memo``; optimizers within it are copied in the same way."""
    memo[id(optimizer)] = made = object.__new__(type(optimizer))
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and id(value) not in memo:
            _copied(value, memo)
    attributes = {name: value for name, value in vars(optimizer).items() if name != "step"}
    vars(made).update({name: copy.deepcopy(value, memo) for name, value in attributes.items()})
    return made
