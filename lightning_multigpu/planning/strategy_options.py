"""The options of a run's strategy, for remedies that change one of them, and the usual size of a bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ON_ONE_HOST_BYTES, BETWEEN_HOSTS_BYTES = 25 << 20, 4 << 20
_MOST_BUCKETS = 128


def usual_bucket_bytes(total_bytes: int, *, between_hosts: bool) -> int:
    """The default size for the ring, or for shared memory on one host; more for large models.

    On a link of 1 Gbit/s the first bucket of 4 MiB travels during most of backward. On one host there is little time to
    hide, and every bucket makes ranks wait for each other once more.
    """
    usual = BETWEEN_HOSTS_BYTES if between_hosts else ON_ONE_HOST_BYTES
    return max(usual, -(-total_bytes // _MOST_BUCKETS))


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
    "RingDDPStrategy": frozenset({"compression", "average_every", "ddp_comm_hook"}),
    "HybridStrategy": frozenset({"compression"}),
}
"""By class that has the option ``compression``: the options that exclude it."""
