"""The one object by which callbacks see a strategy: its figures, and what ranks tell each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.training_memory import measured_bytes
from lightning_multigpu.planning.pipelines.timeline import HeldBytes, StageRecord
from lightning_multigpu.planning.split_plan import SplitPlan
from lightning_multigpu.report.document import MemberChange

if TYPE_CHECKING:
    import lightning.pytorch as pl


@dataclass(frozen=True, kw_only=True)
class RunView:
    """What a strategy tells callbacks on this rank; the functions answer for the moment of the call.

    Attributes:
        meter: of all bytes between ranks; None under Lightning's own strategies.
        options: all options that the strategy runs with; none are known of Lightning's own.
        data_ranks: number of ranks, or of whole pipelines or tensor groups, with a batch of their own.
        devices_per_rank: devices that one rank drives.
        owns_batch: False if this rank's batch does not count: a copy of another rank's, or a repeated one of weight 0.
        is_common: True if all ranks have raised an error at the same batch, so that collectives still work.
        held_bytes: bytes of the parameters, gradients and optimizer states that this rank holds, as measured. Buffers
            in which gradients travel count as gradients; states in the host's memory, or on servers, do not count. Of
            several devices that one rank drives only the first holds bytes between two steps.
        gather: gives an object of each rank to all ranks, in rank order; a collective.
        newest_of_ranks: for values (of types that JSON has) of one name, where ranks train without collectives: rank 0
            gets the newest of each rank that has passed one, another rank its own alone. None with collectives.
        gather_at_end: a list that gets the results of a function on all ranks, as JSON has them, after all callbacks'
            ``on_train_end``: on rank 0 of all ranks, elsewhere its own. None if collectives still work then.
        server_statistics: ``ServerStatistics`` of the parameter servers, on rank 0; None elsewhere and without servers.
        split_plan: the blocks of layers that are split over ranks; None without a tensor split.
        member_changes: ranks that were lost or came in, so far; none where a loss ends the run.
        record_stages: records the passes of this rank's stages of a pipeline in each following fit.
        stage_record: the newest steps of these stages, up to ``on_train_end``; None without a pipeline.
    """

    meter: Meter | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    data_ranks: int = 1
    devices_per_rank: int = 1
    owns_batch: Callable[[], bool] = lambda: True
    is_common: Callable[[BaseException], bool] = lambda error: True
    held_bytes: Callable[[], HeldBytes]
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    newest_of_ranks: Callable[[str, Any], list[Any] | None] = lambda name, value: None
    gather_at_end: Callable[[Callable[[], Any]], list[Any] | None] = lambda value: None
    server_statistics: Callable[[], Any] = lambda: None
    split_plan: Callable[[], SplitPlan | None] = lambda: None
    member_changes: Callable[[], Sequence[MemberChange]] = lambda: ()
    record_stages: Callable[[], None] = lambda: None
    stage_record: Callable[[], StageRecord | None] = lambda: None


def view_of(trainer: pl.Trainer) -> RunView:
    """The view of the trainer's strategy, also of Lightning's own."""
    if (run_view := getattr(trainer.strategy, "run_view", None)) is not None:
        found: RunView = run_view()
        return found
    size = trainer.world_size

    def gather(value: Any) -> list[Any]:
        gathered = [value] * size
        if size > 1:
            dist.all_gather_object(gathered, value)
        return gathered

    return RunView(
        data_ranks=size,
        is_common=lambda error: size == 1,
        held_bytes=lambda: measured_bytes(trainer.lightning_module.parameters(), trainer.optimizers),
        gather=gather,
    )
