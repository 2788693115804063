"""Bytes that training will need for each layer of a chain, and for parameters before and after the layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from lightning_multigpu.engine.pipeline.splitting.chain import Chain
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.training_memory import held_bytes


def layer_bytes(chain: Chain, optimizers: Sequence[Optimizer]) -> list[int]:
    """Bytes of each layer's parameters, their gradients and the states that the optimizers will keep.

    A parameter of several layers counts for the first of them.
    """
    return [held_bytes(own, optimizers).total for own in chain.own_parameters()]


def end_bytes(ownership: Ownership, optimizers: Sequence[Optimizer]) -> tuple[int, int]:
    """As :func:`layer_bytes`, for parameters outside of the layers that only the first, or the last, stage holds."""
    first, last = ownership.at_ends()
    return held_bytes(first, optimizers).total, held_bytes(last, optimizers).total
