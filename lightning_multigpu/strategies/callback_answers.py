"""Answers to callbacks of a strategy whose ranks all do the same, beside Lightning's own interface.

The strategies that start ranks and the one of one process have them as methods; a family overrides those that differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.training_memory import measured_bytes
from lightning_multigpu.planning.pipelines.timeline import HeldBytes, StageRecord
from lightning_multigpu.planning.split_plan import SplitPlan

if TYPE_CHECKING:
    from lightning_multigpu.strategies.base import MultiGPUStrategy


def holds(strategy: MultiGPUStrategy, parameter: Tensor) -> bool:
    """True if this rank has the values of a parameter of the module, and of its gradient."""
    return not isinstance(parameter, Placeholder)


def newest_of_ranks(strategy: MultiGPUStrategy, name: str, value: Any) -> list[Any] | None:
    """The values of ranks that train without collectives, each at its own pace; None if there are collectives.

    Rank 0 gets the newest value of each rank that has passed one, in the order of ranks; another rank gets its own
    alone.

    Args:
        strategy: of this rank.
        name: the same for all values that belong together.
        value: of types that JSON has.
    """
    return None


def gather_at_end(strategy: MultiGPUStrategy, value: Callable[[], Any]) -> list[Any] | None:
    """A list that gets the values of all ranks when training ends; None if collectives still work then.

    Rank 0 gets the values of all ranks, in their order; another rank only its own. All ranks make the same calls.

    Args:
        strategy: of this rank.
        value: returns this rank's value, of types that JSON has; called after all callbacks' ``on_train_end``.
    """
    return None


def server_statistics(strategy: MultiGPUStrategy) -> Any:
    """The counts of the parameter servers on rank 0, which asks the servers; None elsewhere and without servers.

    They are :class:`~lightning_multigpu.engine.parameter_server.server_statistics.ServerStatistics`.
    """
    return None


def held_bytes(strategy: MultiGPUStrategy) -> HeldBytes:
    """Bytes of the parameters, gradients and optimizer states that this rank holds at present, as measured.

    Buffers in which gradients travel count as gradients. Optimizer states in the host's memory, or on servers, do
    not count. Of several devices that one rank drives only the first holds bytes between two steps.
    """
    held = measured_bytes(strategy._module.parameters(), strategy.optimizers)
    return replace(held, gradients_bytes=held.gradients_bytes + strategy._spare_bytes)


def split_plan(strategy: MultiGPUStrategy) -> SplitPlan | None:
    """The blocks of layers that are split over ranks, and what each sends; None without a tensor split."""
    return None


def record_stages(strategy: MultiGPUStrategy) -> None:
    """Records the passes of this rank's stages of a pipeline in every following fit."""


def stage_record(strategy: MultiGPUStrategy) -> StageRecord | None:
    """The newest steps and the memory of this rank's stages of a pipeline; None without a pipeline.

    The record belongs to the running fit: callbacks can read it up to their ``on_train_end``.
    """
    return None
