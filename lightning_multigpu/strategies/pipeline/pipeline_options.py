"""Options of a pipeline, their checks, and the split that they define."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import Module

from lightning_multigpu.engine.activation_checkpointing import Choice, check_choice
from lightning_multigpu.engine.pipeline.splitting.chain import Chain, find_chain
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.pipeline.splitting.traced_chain import TracedChain
from lightning_multigpu.engine.tensor_split.parts import local
from lightning_multigpu.planning.pipelines.balance import balanced_bounds, bounds_of_counts
from lightning_multigpu.planning.pipelines.schedule_order import LOOPED_SCHEDULES, SCHEDULES, ScheduleName
from lightning_multigpu.planning.pipelines.stage_costs import MeasuredBalance
from lightning_multigpu.strategies import option_checks


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Options as in :class:`~lightning_multigpu.strategies.pipeline.strategy.PipelineStrategy`.

    Raises:
        ValueError: an option is out of its range, or two options exclude each other.
    """

    module: str
    schedule: ScheduleName
    num_micro_batches: int | Literal["auto"]
    stages_per_rank: int | None
    balance: Literal["parameters"] | MeasuredBalance | Sequence[int]
    split_points: Sequence[str] | None
    pipeline_parallel_size: int | None
    data_parallel_size: int | None
    activation_checkpointing: Choice
    verify_steps: int
    batch_dim: int
    replicated: bool | Sequence[str] = False
    gather_at_end: bool = True

    def __post_init__(self) -> None:
        option_checks.check_choice("schedule", self.schedule, SCHEDULES)
        option_checks.check_bools(gather_at_end=self.gather_at_end)
        option_checks.check_number("verify_steps", self.verify_steps, least=0, whole=True)
        if self.num_micro_batches != "auto":
            option_checks.check_number("num_micro_batches", self.num_micro_batches, whole=True)
        for name in ("stages_per_rank", "pipeline_parallel_size", "data_parallel_size"):
            if getattr(self, name) is not None:
                option_checks.check_number(name, getattr(self, name), whole=True)
        option_checks.check_number("batch_dim", self.batch_dim, least=0, whole=True)
        if isinstance(self.balance, str):
            option_checks.check_choice("balance", self.balance, ("parameters", "time", "memory"))
        names = self.replicated if isinstance(self.replicated, Sequence) else ()
        if isinstance(self.replicated, str) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"replicated={self.replicated!r}: pass True, or a list of names such as ['embedding']")
        looped = self.schedule in LOOPED_SCHEDULES
        if self.stages_per_rank is not None and (self.stages_per_rank > 1) != looped:
            others = f"leave it out, or use one of the schedules {', '.join(LOOPED_SCHEDULES)}"
            fix = "pass 2 or more" if looped else others
            raise ValueError(f"stages_per_rank={self.stages_per_rank} under schedule={self.schedule!r}; {fix}")
        check_choice(self.activation_checkpointing)
        if self.activation_checkpointing and self.schedule == "zero_bubble":
            raise ValueError(
                "activation_checkpointing under schedule='zero_bubble', whose backward has two parts: layers "
                "would be computed again for each group of their parameters; use schedule='interleaved', or leave it "
                "out"
            )
        if self.split_points is not None:
            self._check_split_points(self.split_points)

    def _check_split_points(self, points: object) -> None:
        if isinstance(points, str) or not isinstance(points, Sequence):
            raise ValueError(f"split_points={points!r} is no list; pass names of submodules, such as ['net.decoder']")
        names = list(points)
        if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
            raise ValueError(
                f"split_points={names!r}: pass one or more different names of submodules, such as ['net.decoder']"
            )
        if self.balance != "parameters":
            raise ValueError(
                f"balance={self.balance!r} and split_points={names!r} both split the module; leave one out"
            )
        if not isinstance(self.activation_checkpointing, bool):
            raise ValueError(
                f"activation_checkpointing={self.activation_checkpointing!r}: between split_points there are no layers "
                "to name; pass True for all"
            )

    @property
    def measured_balance(self) -> MeasuredBalance | None:
        """The measured cost by which the layers are split; None for a split without measurement."""
        return self.balance if self.balance == "time" or self.balance == "memory" else None

    @property
    def num_stages_of_rank(self) -> int:
        """Stages of each rank."""
        return self.stages_per_rank or (2 if self.schedule in LOOPED_SCHEDULES else 1)

    def num_parts(self, num_ranks: int) -> int:
        """Micro-batches of a batch with enough samples, in a pipeline of ``num_ranks`` ranks."""
        usual = 4 * num_ranks if num_ranks > 1 else 1
        return usual if self.num_micro_batches == "auto" else self.num_micro_batches

    def num_ranks_of_pipeline(self, num_ranks: int) -> int:
        """Ranks of each pipeline, for ``num_ranks`` ranks in all."""
        return self.pipeline_parallel_size or max(1, num_ranks // (self.data_parallel_size or 1))

    def check_num_ranks(self, num_ranks: int) -> None:
        """Checks that ``num_ranks`` ranks can form the pipelines, and that the split points fit the number of stages.

        Raises:
            ValueError: they cannot, or the split points do not fit.
        """
        size, pipelines = self.num_ranks_of_pipeline(num_ranks), self.data_parallel_size
        if pipelines is not None and size * pipelines != num_ranks:
            given = f"data_parallel_size={pipelines}"
            if self.pipeline_parallel_size is not None:
                given = f"pipeline_parallel_size={size} times {given}"
            raise ValueError(f"{given} does not make the {num_ranks} ranks that there are; leave one out, or change it")
        self._check_num_split_points(size)

    def _check_num_split_points(self, num_ranks: int) -> None:
        per_rank, points = self.num_stages_of_rank, self.split_points
        num_stages = num_ranks * per_rank
        if points is not None and len(points) + 1 != num_stages:
            raise ValueError(
                f"split_points={list(points)!r} makes {len(points) + 1} stages, and {num_ranks} ranks with {per_rank} "
                f"each have {num_stages}; name {num_stages - 1} submodules, or change devices"
            )

    def chain(self, module: Module, num_ranks: int, device: torch.device) -> Chain:
        """The part of the module that is split; a chain without layers if one rank runs the whole module.

        Raises:
            ValueError: the module has no part of that name, or the part has too few layers.
        """
        if num_ranks * self.num_stages_of_rank == 1:
            chain = Chain(type(module).__name__, (), {module: ""})
        elif self.split_points is not None:
            self._check_num_split_points(num_ranks)
            chain = TracedChain(module, self.module, self.split_points, device)
        else:
            chain = find_chain(module, self.module, num_ranks * self.num_stages_of_rank)
        known = {name for name, _ in (*module.named_modules(), *module.named_parameters(remove_duplicate=False))}
        for name in self.replicated if isinstance(self.replicated, Sequence) else ():
            if name not in known:
                raise ValueError(f"replicated names {name!r}, which is no part of the module; name one of its parts")
        chain.replicated = self.replicated
        return chain

    def bounds(self, chain: Chain, num_ranks: int) -> list[tuple[int, int]]:
        """The layers ``[start, stop)`` of each stage; before a measurement those of ``balance="parameters"``.

        Raises:
            ValueError: ``balance`` is a list for another number of layers or stages.
        """
        num_stages = num_ranks * self.num_stages_of_rank
        if num_stages == 1:
            return [(0, len(chain))]
        if isinstance(self.balance, str):
            sizes = chain.parameter_bytes()
            # A layer that is in its container several times runs, and counts, as many times.
            each = [sizes[chain.layers.index(layer)] for layer in chain.layers]
            bounds = balanced_bounds(each, num_stages)
            at_ends = Ownership(next(iter(chain.around)), chain, bounds, 0, num_ranks).at_ends()
            before, after = (sum(local(parameter).nbytes for parameter in own) for own in at_ends)
            return balanced_bounds(each, num_stages, before, after)
        return bounds_of_counts(self.balance, len(chain), num_stages)
