"""Checkpoints of a pipeline: what the stages hold, put together on the last stage, which is the rank that writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_multigpu.engine.pipeline.ownership import Ownership
from lightning_multigpu.engine.pipeline.stand_in import StandIn
from lightning_multigpu.engine.pipeline.transfer import Line


def whole_state_dict(state: dict[str, Any], ownership: Ownership, line: Line) -> dict[str, Any]:
    """The module's state with all values, in the host's memory, on the last stage; elsewhere the stage's own part.

    Every stage of the pipeline has to call it. Keys keep their order.

    Args:
        state: ``module.state_dict()``, with stand-ins.
        ownership: who holds what.
        line: to the other stages.
    """
    holders_of = ownership.holders_by_name()
    last = line.num_ranks - 1
    whole = dict(state)
    for key, value in state.items():
        holders = holders_of.get(key, (last,))
        if last in holders or not isinstance(value, Tensor):
            continue
        if ownership.position == holders[0]:
            line.send(value, last)
        elif ownership.position == last:
            whole[key] = line.receive(torch.empty(value.shape, dtype=value.dtype), holders[0])
    line.finish()
    return whole


def whole_optimizer_state(optimizer: Optimizer, ownership: Ownership, line: Line) -> dict[str, Any]:
    """The optimizer's state of one device, in the host's memory, on the last stage; elsewhere the stage's own part.

    Every stage of the pipeline has to call it. Parameters are numbered as on one device.
    """
    state: dict[str, Any] = optimizer.state_dict()
    last = line.num_ranks - 1
    merged: dict[int, Any] = {}
    for index, holders in enumerate(_holders(optimizer, ownership)):
        own = state["state"].get(index)
        if last not in holders:
            if ownership.position == holders[0]:
                line.send_object(_on_host(own), last)
            elif ownership.position == last:
                own = line.receive_object(holders[0])
        if own is not None:
            merged[index] = own
    line.finish()
    return {**state, "state": merged}


def own_optimizer_state(state: Mapping[str, Any], optimizer: Optimizer, ownership: Ownership) -> dict[str, Any]:
    """Of one device's optimizer state, what belongs to parameters that this stage holds; copies."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    held = {
        number
        for number, holders in zip(numbers, _holders(optimizer, ownership), strict=False)
        if ownership.position in holders
    }
    own = {number: value for number, value in state["state"].items() if number in held}
    # An optimizer keeps what it is given, and with it the file that the values may be mapped from.
    return {**state, "state": tree_map_only(Tensor, torch.clone, own)}


def _holders(optimizer: Optimizer, ownership: Ownership) -> list[tuple[int, ...]]:
    """The positions that hold each parameter of the optimizer, in its order; all, for what is not the module's."""
    holders_of = {id(holding.tensor): holding.holders for holding in ownership.holdings}
    everywhere = tuple(range(ownership.num_ranks))
    return [holders_of.get(id(p), everywhere) for group in optimizer.param_groups for p in group["params"]]


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        assert not isinstance(value, StandIn)
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _on_host(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_host(entry) for entry in value)
    return value
