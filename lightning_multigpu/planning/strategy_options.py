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

    def value(self, option: str) -> Any:
        """The value of an option; None where it is at its default."""
        return {**self.fixed, **self.chosen}.get(option)

    def with_(self, **options: Any) -> str:
        """The strategy with some options changed, as code; the user's other options are to be kept."""
        values = {name: f'"{v}"' if isinstance(v, str) else repr(v) for name, v in {**self.fixed, **options}.items()}
        arguments = ", ".join(f"{name}={value}" for name, value in values.items())
        return f"{self.class_name}({arguments})" if self.class_name else arguments

    def with_compression(self) -> str | None:
        """The strategy with gradients in bfloat16, as code; None where that cannot be, or is so already."""
        excluded = _EXCLUDE_COMPRESSION.get(self.class_name)
        possible = excluded is not None and not excluded & {**self.fixed, **self.chosen}.keys()
        return self.with_(compression="bf16") if possible else None


_EXCLUDE_COMPRESSION = {
    "RingDDPStrategy": frozenset({"compression", "ddp_comm_hook"}),
    "HybridStrategy": frozenset({"compression"}),
}
"""By class that has the option ``compression``: the options that exclude it."""
