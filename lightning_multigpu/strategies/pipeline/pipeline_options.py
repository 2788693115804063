"""The options of a pipeline, checked, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import Module

from lightning_multigpu.engine.pipeline.splitting.chain import Chain, find_chain
from lightning_multigpu.engine.pipeline.splitting.traced_chain import TracedChain
from lightning_multigpu.engine.pipeline.stages.runner import LOOPED_SCHEDULES, SCHEDULES, ScheduleName
from lightning_multigpu.planning.balance import balanced_cuts, cuts_of_counts, stage_bounds
from lightning_multigpu.planning.stage_costs import MeasuredBalance
from lightning_multigpu.strategies import option_checks
from lightning_multigpu.strategies.pipeline.pipeline_checks import (
    check_activation_checkpointing,
    check_num_split_points,
    check_split_points,
    check_stages_per_rank,
)


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """As in :class:`~lightning_multigpu.strategies.pipeline.strategy.PipelineStrategy`.

    Raises:
        ValueError: one is out of its range, or two do not go together.
    """

    module: str
    schedule: ScheduleName
    num_micro_batches: int | Literal["auto"]
    stages_per_rank: int | None
    balance: Literal["parameters"] | MeasuredBalance | Sequence[int]
    split_points: Sequence[str] | None
    pipeline_parallel_size: int | None
    data_parallel_size: int | None
    activation_checkpointing: bool | Sequence[str | type]

    def __post_init__(self) -> None:
        option_checks.check_choice("schedule", self.schedule, SCHEDULES)
        if self.num_micro_batches != "auto":
            option_checks.check_positive("num_micro_batches", self.num_micro_batches, whole=True)
        if self.stages_per_rank is not None:
            option_checks.check_positive("stages_per_rank", self.stages_per_rank, whole=True)
        check_stages_per_rank(self.schedule, self.stages_per_rank)
        if isinstance(self.balance, str):
            option_checks.check_choice("balance", self.balance, ("parameters", "time", "memory"))
        if self.pipeline_parallel_size is not None:
            option_checks.check_positive("pipeline_parallel_size", self.pipeline_parallel_size, whole=True)
        if self.data_parallel_size is not None:
            option_checks.check_positive("data_parallel_size", self.data_parallel_size, whole=True)
        check_activation_checkpointing(self.activation_checkpointing, self.schedule)
        check_split_points(self.split_points, self.balance, self.activation_checkpointing)

    @property
    def measured_balance(self) -> MeasuredBalance | None:
        """What the layers are split by once they have been measured; None if they need not be."""
        return self.balance if self.balance == "time" or self.balance == "memory" else None

    @property
    def num_stages_of_rank(self) -> int:
        """Stages that each rank has."""
        return self.stages_per_rank or (2 if self.schedule in LOOPED_SCHEDULES else 1)

    def num_parts(self, num_ranks: int) -> int:
        """Micro-batches that a batch is cut into in a pipeline of so many ranks, if it has that many samples."""
        return 4 * num_ranks if self.num_micro_batches == "auto" else self.num_micro_batches

    def num_ranks_of_pipeline(self, num_ranks: int) -> int:
        """Ranks of each pipeline, of so many in all."""
        return self.pipeline_parallel_size or max(1, num_ranks // (self.data_parallel_size or 1))

    def check_num_ranks(self, num_ranks: int) -> None:
        """So many ranks can be dealt out to pipelines, and there are as many stages as points make, if there are any.

        Raises:
            ValueError: they cannot, or there are not.
        """
        size, pipelines = self.num_ranks_of_pipeline(num_ranks), self.data_parallel_size
        if pipelines is not None and size * pipelines != num_ranks:
            given = f"data_parallel_size={pipelines}"
            if self.pipeline_parallel_size is not None:
                given = f"pipeline_parallel_size={size} times {given}"
            raise ValueError(f"{given} does not make the {num_ranks} ranks that there are; leave one out, or change it")
        if self.split_points is not None:
            check_num_split_points(self.split_points, size, self.num_stages_of_rank)

    def chain(self, module: Module, num_stages: int, device: torch.device) -> Chain:
        """What is split of the module.

        Args:
            module: the whole.
            num_stages: of the pipeline.
            device: where this rank computes.

        Raises:
            ValueError: there is nothing of that name, or it has too few layers.
        """
        if self.split_points is not None:
            return TracedChain(module, self.module, self.split_points, device)
        return find_chain(module, self.module, num_stages)

    def bounds(self, chain: Chain, num_stages: int) -> list[tuple[int, int]]:
        """The layers ``[start, stop)`` of each stage; those of "parameters" where layers have to be measured first.

        Raises:
            ValueError: a list as ``balance`` counts other layers or stages than there are.
        """
        if isinstance(self.balance, str):
            return stage_bounds(balanced_cuts(chain.parameter_bytes(), num_stages), len(chain))
        return stage_bounds(cuts_of_counts(self.balance, len(chain), num_stages), len(chain))
