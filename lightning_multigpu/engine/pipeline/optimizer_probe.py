"""Optimizer probe: whether an optimizer's update of one parameter depends on other parameters.

A stage of a pipeline has only the gradients of its own parameters. An optimizer that clips by the norm of all
gradients, or divides by it, would make another step on each stage.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS

_STEPS = 2
_FACTORS = (1e-4, 1e4)


def couples_parameters(optimizer: Any) -> bool:
    """Whether the optimizer changes a parameter by the values or gradients of others.

    Classes of ``torch.optim`` but LBFGS are known not to. A copy of another optimizer, or of one with hooks, takes a
    few steps: its parameters have 2 numbers in each dimension, and every second one has small or large gradients.

    Raises:
        Exception: whatever the copy raises.
    """
    if isinstance(optimizer, LBFGS):
        return True
    hooks = any(vars(optimizer).get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post"))
    if type(optimizer).__module__.startswith("torch.optim.") and not hooks:
        return False
    with torch.random.fork_rng(devices=[]):
        for kept in (0, 1):
            small, large = (_updated(optimizer, kept, factor) for factor in _FACTORS)
            if not all(map(torch.equal, small, large)):
                return True
    return False


def _updated(optimizer: Any, kept: int, factor: float) -> list[Tensor]:
    """Every second parameter of a copy after a few steps, in which the others have gradients of size ``factor``."""
    generator = torch.Generator().manual_seed(0)
    torch.default_generator.manual_seed(0)  # that of the CPU alone, whose state the caller keeps
    tiny: dict[int, Any] = {}
    slopes: list[Tensor] = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        is_kept = len(tiny) % 2 == kept
        values = torch.randn((2, *[2] * parameter.ndim), generator=generator, dtype=torch.float64)
        slopes.append(values[1] if is_kept else factor * values[1])
        tiny[id(parameter)] = Parameter(values[0] if is_kept else factor * values[0])
    memo = {**tiny, id(optimizer.state): defaultdict(dict)}
    made = memo[id(optimizer)] = object.__new__(type(optimizer))
    attributes = {name: value for name, value in vars(optimizer).items() if name != "step"}  # a scheduler's wrapper
    vars(made).update({name: copy.deepcopy(value, memo) for name, value in attributes.items()})

    def closure() -> Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for parameter, slope in zip(tiny.values(), slopes, strict=True):
            gradient = 0.5 * parameter.detach() + slope
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            loss = loss + (0.25 * parameter.detach().square() + slope * parameter.detach()).sum()
        return loss

    for _ in range(_STEPS):
        for parameter in tiny.values():
            parameter.grad = None
        closure()  # a batch that is accumulated
        made.step(closure)
    return [parameter.detach() for parameter in tiny.values()][kept::2]
