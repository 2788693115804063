"""Bytes that parameters, their gradients and their optimizer states take in training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.nn import Parameter
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from lightning_multigpu.engine.pipeline.splitting.chain import Chain
from lightning_multigpu.planning.stage_costs import HeldBytes

UNKNOWN_STATES = 2
"""Tensors of a parameter's size that an optimizer is taken to keep where it is none of torch's: those of Adam."""

_STATES: dict[type[Optimizer], Callable[[dict[str, object]], int]] = {
    SGD: lambda group: bool(group["momentum"]),
    Adam: lambda group: 2 + bool(group["amsgrad"]),
    AdamW: lambda group: 2 + bool(group["amsgrad"]),
    NAdam: lambda group: 2,
    RAdam: lambda group: 2,
    Adamax: lambda group: 2,
    Adadelta: lambda group: 2,
    ASGD: lambda group: 1,
    Rprop: lambda group: 2,
    Adagrad: lambda group: 1,
    RMSprop: lambda group: 1 + bool(group["momentum"]) + bool(group["centered"]),
}


def held_bytes(parameters: Iterable[Parameter], optimizers: Sequence[Optimizer]) -> HeldBytes:
    """What a rank that holds the parameters needs for them in training."""
    states: dict[Tensor, int] = {}
    for optimizer in optimizers:
        count = _STATES.get(type(optimizer))
        for group in optimizer.param_groups:
            states.update(dict.fromkeys(group["params"], UNKNOWN_STATES if count is None else count(group)))
    sizes = {parameter: parameter.numel() * parameter.element_size() for parameter in parameters}
    trained = {parameter: size for parameter, size in sizes.items() if parameter.requires_grad}
    return HeldBytes(
        sum(sizes.values()),
        sum(trained.values()),
        sum(size * states.get(parameter, 0) for parameter, size in trained.items()),
    )


def layer_bytes(chain: Chain, optimizers: Sequence[Optimizer]) -> list[int]:
    """Of each layer, the bytes of its parameters, their gradients and the states that the optimizers will keep.

    A parameter that an earlier layer has too counts for that one.
    """
    seen: set[Tensor] = set()
    sizes = []
    for layer in chain.layers:
        own = set(layer.parameters()) - seen
        seen |= own
        sizes.append(held_bytes(own, optimizers).total)
    return sizes
