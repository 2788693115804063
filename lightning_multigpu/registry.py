"""The regimes of the pack, one row each: what ``Trainer(strategy=...)`` accepts and what it will do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_multigpu.strategies.base import MultiGPUStrategy
from lightning_multigpu.strategies.ring_ddp import RingDDPStrategy


@dataclass(frozen=True, kw_only=True)
class Regime:
    """One registered training regime.

    Args:
        name: what the user passes to ``Trainer(strategy=...)``.
        strategy: the class behind the name.
        options: arguments that the name fixes.
        summary: the regime in one line.
        compute: where the computation happens.
        gradients: how gradients travel.
        model: how the model travels.
        bytes_per_step: bytes that travel per optimizer step, as a formula in S (bytes of the gradients, which are those
            of the model), N (workers), n (nodes) and K (servers).
        synchronous: whether the regime computes what one device computes at the same global batch.
    """

    name: str
    strategy: type[MultiGPUStrategy]
    options: Mapping[str, Any] = field(default_factory=dict)
    summary: str
    compute: str
    gradients: str
    model: str
    bytes_per_step: str
    synchronous: bool = True


_RING_DDP: dict[str, Any] = {
    "compute": "all workers, each on its share of the batch",
    "gradients": "within a host through shared memory, between hosts to ring neighbours (reduce-scatter, then "
    "all-gather), while backward still runs",
    "model": "broadcast once at the start; every worker applies the same update",
    "bytes_per_step": "2(n-1)/n x S sent per node; within a node S written to its memory per worker",
}

REGIMES: tuple[Regime, ...] = (
    Regime(
        name="ring_ddp",
        strategy=RingDDPStrategy,
        summary="data parallel training, gradients averaged by a ring all-reduce",
        **_RING_DDP,
    ),
    Regime(
        name="ring_ddp_spawn",
        strategy=RingDDPStrategy,
        options={"start_method": "spawn"},
        summary="ring_ddp with processes spawned from a running interpreter, for notebooks and REPLs",
        **_RING_DDP,
    ),
)


def register_all() -> None:
    """Makes every regime known to ``lightning.pytorch.Trainer`` by its name; calling it again changes nothing."""
    for regime in REGIMES:
        if regime.name not in StrategyRegistry:
            StrategyRegistry.register(
                regime.name, regime.strategy, description=regime.summary, override=False, **regime.options
            )
