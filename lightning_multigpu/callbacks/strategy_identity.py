"""Which strategy a run used: its registered name and the options that somebody chose."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_multigpu._lightning_internals import argument_of

# Parts that the Trainer puts together, rather than settings of the strategy.
_PARTS = frozenset(
    {"accelerator", "parallel_devices", "device", "cluster_environment", "checkpoint_io", "precision_plugin"}
)


def identify(strategy: Strategy) -> tuple[str, dict[str, Any]]:
    """The name to pass to ``Trainer(strategy=...)`` for this strategy, and its options that are not at their default.

    The name is the registered one that fixes most of the options that the strategy has, and no other; what it fixes
    is not repeated among the options. Where there is none, it is the class's name.
    """
    chosen = _chosen(strategy)
    name, fixed = _registered(strategy, chosen)
    options = {option: _jsonable(value) for option, value in chosen.items() if option not in fixed}
    return name, options


def _chosen(strategy: Strategy) -> dict[str, Any]:
    """The options that are not at their default: as the strategy says, else as its constructor shows."""
    told = getattr(strategy, "options", None)
    if isinstance(told, Mapping):
        return dict(told)
    chosen: dict[str, Any] = {}
    for option, default in _defaults(type(strategy)).items():
        try:
            value = argument_of(strategy, option)
        except AttributeError:
            continue
        if value is not default and value != default and not (value is None or inspect.ismethod(value)):
            chosen[option] = value
    # Options taken as **kwargs have no default in the signature: whatever is there was given.
    for option, value in _given_kwargs(strategy).items():
        chosen.setdefault(option, value)
    return chosen


def _given_kwargs(strategy: Strategy) -> dict[str, Any]:
    try:
        kwargs = argument_of(strategy, "ddp_kwargs")
    except AttributeError:
        return {}
    defaults = _defaults(type(strategy))
    return {option: value for option, value in kwargs.items() if option not in defaults}


def _defaults(cls: type) -> dict[str, Any]:
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty and p.name not in _PARTS}


def _registered(strategy: Strategy, chosen: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    defaults = _defaults(type(strategy))
    best: tuple[str, Mapping[str, Any]] | None = None
    for name in StrategyRegistry:
        row = StrategyRegistry[name]
        fixed = row["init_params"]
        if row["strategy"] is not type(strategy):
            continue
        if any(chosen.get(option, defaults.get(option)) != value for option, value in fixed.items()):
            continue
        if best is None or len(fixed) > len(best[1]):
            best = name, fixed
    if best is None:
        return str(getattr(strategy, "strategy_name", type(strategy).__name__)), {}
    return best


def _jsonable(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, type) or inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{type(value).__module__}.{type(value).__qualname__}"
