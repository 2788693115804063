"""The identity of a strategy: its registered name and the options that are not at their default."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_multigpu._lightning_internals import further_ddp_options
from lightning_multigpu.planning.strategy_options import StrategyOptions

# Parts that the Trainer puts together, and options that are filled in by the end of a fit whether chosen or not.
_NOT_CHOSEN = frozenset(
    {
        "accelerator",
        "parallel_devices",
        "device",
        "cluster_environment",
        "checkpoint_io",
        "precision_plugin",
        "process_group_backend",
    }
)


def identify(strategy: Strategy) -> tuple[str, dict[str, Any]]:
    """The name to pass to ``Trainer(strategy=...)`` for this strategy, and its options that are not at their default.

    The name is the registered one that fixes most of the strategy's options, and fixes none that the strategy lacks;
    the fixed options are not repeated. Without such a name it is the class's name.
    """
    chosen = _chosen(strategy)
    name, fixed = _registered(strategy, chosen)
    options = {option: _jsonable(value) for option, value in chosen.items() if option not in fixed}
    return name, options


def strategy_options(strategy: Strategy) -> StrategyOptions:
    """The same for remedies: of a class of this pack, with the options that its registered name fixes."""
    is_ours = type(strategy).__module__.startswith("lightning_multigpu.")
    _, fixed = _registered(strategy, _chosen(strategy))
    _, chosen = identify(strategy)
    return StrategyOptions(class_name=type(strategy).__name__ if is_ours else "", fixed=fixed, chosen=chosen)


def _chosen(strategy: Strategy) -> dict[str, Any]:
    """The options that are not at their default: as the strategy says, else as its attributes show."""
    told: Mapping[str, Any] = getattr(strategy, "options", {})
    chosen: dict[str, Any] = {}
    for option, default in _defaults(type(strategy)).items():
        # Lightning's classes keep their arguments under either name.
        places = [place for place in (option, f"_{option}") if option not in told and hasattr(strategy, place)]
        value = getattr(strategy, places[0]) if places else told.get(option)
        if value is not default and value != default and not (value is None or inspect.ismethod(value)):
            chosen[option] = value
    return chosen | further_ddp_options(strategy)


def _defaults(cls: type) -> dict[str, Any]:
    """The defaults of all options of a class, those included that it hands on to its base as ``**options``."""
    defaults: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        for parameter in parameters:
            if parameter.default is not parameter.empty and parameter.name not in _NOT_CHOSEN:
                defaults.setdefault(parameter.name, parameter.default)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return defaults


def _registered(strategy: Strategy, chosen: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    defaults = _defaults(type(strategy))
    best: tuple[str, Mapping[str, Any]] | None = None
    for name in StrategyRegistry:
        row = StrategyRegistry[name]
        fixed = row["init_params"]
        if getattr(row["strategy"], "strategy", row["strategy"]) is not type(strategy):  # ours are rows
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
