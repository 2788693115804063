"""Strategies of a bench, given as ``ddp``, ``ring_ddp:bucket_cap_mb=4`` or ``package.Class:option=value``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pydoc import locate
from typing import Any

import yaml
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_multigpu._suggest import did_you_mean

NO_COMMUNICATION = "no communication"


@dataclass(frozen=True)
class Contender:
    """One strategy with its options, labelled as it was written.

    Without a class each rank trains by itself, and the label is :data:`NO_COMMUNICATION`.
    """

    label: str
    strategy: type[Strategy] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_one_process(self) -> bool:
        """Whether one process drives all devices of a host, as under ``dp``."""
        return not getattr(self.strategy, "starts_ranks", True)

    def make(self) -> Strategy:
        assert self.strategy is not None
        return self.strategy(**self.options)


def contender(text: str) -> Contender:
    """Reads ``name``, ``name:option=value`` or ``name:option=value,other=[value, value]``; values are YAML.

    The strategy is made once here, so that wrong values raise before any rank starts.

    Raises:
        ValueError: no such strategy or option, a value that it refuses, or a name that starts processes of its own.
    """
    name, _, rest = text.partition(":")
    cls, fixed = _registered_or_class(name.strip())
    given: dict[str, Any] = {}
    # Parts are between commas, but for those within brackets: balance=[1, 7],num_micro_batches=2
    for part in re.findall(r"(?:\{[^}]*\}|\[[^]]*\]|[^,])+", rest):
        option, equals, value = part.partition("=")
        if not equals or not option.strip():
            raise ValueError(f"{text}: {part!r} is no option=value; write {name}:bucket_cap_mb=4")
        given[option.strip()] = yaml.safe_load(value)
    found = Contender(text, cls, {**fixed, **given})
    if found.options.get("start_method", "popen") != "popen":
        raise ValueError(f"{text}: the bench starts all processes itself; pass the strategy's name without that ending")
    try:
        found.make()
    except (ValueError, TypeError, ImportError) as error:
        raise ValueError(f"{text}: {error}") from error
    return found


def _registered_or_class(name: str) -> tuple[type[Strategy], dict[str, Any]]:
    if "." in name:
        cls = locate(name)
        if not (isinstance(cls, type) and issubclass(cls, Strategy)):
            raise ValueError(f"{name} is no Strategy of Lightning; pass a class that is, or a strategy's name")
        return cls, {}
    if name.lower() not in StrategyRegistry:
        known = StrategyRegistry.available_strategies()
        hint = did_you_mean(name, known) or f"Known: {', '.join(known)}"
        raise ValueError(f"strategy={name!r}: there is no such strategy. {hint}")
    entry = StrategyRegistry[name.lower()]
    return getattr(entry["strategy"], "strategy", entry["strategy"]), dict(entry["init_params"])  # ours are rows
