"""The options of a run's strategy, for remedies that change one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The strategy of a run: its class, and the options that it was made with.

    Attributes:
        class_name: of this pack's strategies, such as "RingDDPStrategy"; "" for one of Lightning or of the user.
        fixed: options that the run's registered name stands for.
        chosen: further options that are not at their default.
    """

    class_name: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    chosen: Mapping[str, Any] = field(default_factory=dict)

    def of_pipeline(self, option: str) -> Any:
        """The value of a pipeline's option; None where it is at its default."""
        options = {**self.fixed, **self.chosen}
        if self.class_name == "HybridStrategy":
            options = options.get("pipeline") or {}
        return options.get(option)

    def with_(self, **options: Any) -> str:
        """The strategy with some options changed, as code; the user's other options are to be kept."""
        arguments = ", ".join(f"{name}={_text(value)}" for name, value in {**self.fixed, **options}.items())
        return f"{self.class_name}({arguments})" if self.class_name else arguments

    def with_pipeline(self, **options: Any) -> str:
        """The same for the options of a pipeline."""
        if self.class_name != "HybridStrategy":
            return self.with_(**options)
        return self.with_(pipeline={**(self.chosen.get("pipeline") or {}), **options})

    def with_compression(self) -> str | None:
        """The strategy with gradients in bfloat16, as code; None where that cannot be, or is so already."""
        excluded = _EXCLUDE_COMPRESSION.get(self.class_name)
        possible = excluded is not None and not excluded & {**self.fixed, **self.chosen}.keys()
        return self.with_(compression="bf16") if possible else None


_EXCLUDE_COMPRESSION = {
    "RingDDPStrategy": frozenset({"compression", "average_every", "ddp_comm_hook"}),
    "HybridStrategy": frozenset({"compression"}),
}
"""By class that has the option ``compression``: the options that exclude it."""


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(name)}: {_text(each)}" for name, each in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else repr(value)
