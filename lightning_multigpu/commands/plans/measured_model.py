"""The measurement of a user's model for a plan: whole, in parts of split layers, and layer by layer for pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_multigpu.planning.pipelines.pipeline_prediction import PipelinePlan
from lightning_multigpu.planning.scaling.machine_model import Machine, World
from lightning_multigpu.planning.scaling.model_profile import ModelProfile, SplitPart
from lightning_multigpu.planning.scaling.step_model import PIPELINES
from lightning_multigpu.strategies.pipeline.pipeline_options import PipelineOptions
from lightning_multigpu.strategies.pipeline.pipeline_planner import PlanError, pipeline_plans
from lightning_multigpu.strategies.pipeline.strategy import PipelineStrategy
from lightning_multigpu.strategies.steps.lone_steps import LoneRank, LoneStepsError, lone_steps

_ROUNDS = 5
_SECONDS = 1.0
"""Of each round and number of ranks."""


@dataclass(frozen=True, kw_only=True)
class PlannedModule:
    """What is measured: a module with its data, settings and callbacks of the Trainer, and options of a pipeline."""

    module: pl.LightningModule
    datamodule: pl.LightningDataModule | None
    trainer_settings: Mapping[str, Any]
    callbacks: Sequence[pl.Callback]
    device: torch.device
    pipeline_options: PipelineOptions | None = None


def measured_model(
    subject: PlannedModule,
    machine: Machine,
    worlds: Iterable[World],
    names: Sequence[str],
    *,
    num_micro_batches: Sequence[int] = (),
    tell: Callable[[str], object] = lambda what: None,
) -> ModelProfile:
    """The profile of a model, for predictions of the strategies ``names`` in ``worlds``.

    Ranks that would share the machine's cores are measured at once, if this machine has the cores. Weights of the
    module do not change. Pipelines have 4 micro-batches for each rank, and ``num_micro_batches`` besides; ``tell`` is
    told what is measured next.

    Raises:
        LoneStepsError: the training step raises an error on one device, or there is no batch.
    """
    worlds = [world for world in worlds if world.size > 1]
    crowds = {world: machine.crowd(world) for world in worlds}
    sizes = {world.size for world in worlds}
    if "hybrid" in names:  # whose pipelines and split layers have some of the ranks
        sizes = {size for largest in sizes for size in range(2, largest + 1) if largest % size == 0}
    tell("the whole model")
    at_once = {min(crowd, machine.cores(World(1, world.devices))) for world, crowd in crowds.items()}  # of a pipeline
    whole = _rounds(subject, sorted({1, *crowds.values(), *map(round, at_once)}))
    refused: dict[str, str] = {}
    splits: dict[int, SplitPart] = {}
    if {"tensor_split", "hybrid"} & set(names):
        for size in sorted(sizes):
            tell(f"its layers split over {size} ranks")
            own = sorted({crowds[world] for world in worlds if world.size == size} or {machine.crowd(World(1, size))})
            try:
                splits[size] = _part(size, _rounds(subject, own, size))
            except LoneStepsError as error:
                refused[f"tensor_split on {size} ranks"] = str(error)
    pipelines: list[PipelinePlan] = []
    if {*PIPELINES, "hybrid"} & set(names):
        tell("its layers one by one")
        pipelines, reasons = _pipelines(subject, sorted(sizes), names, num_micro_batches)
        refused |= reasons
    first = whole[1]
    return ModelProfile(
        name=type(subject.module).__name__,
        samples=first.samples or 0,
        parameters=sum(parameter.numel() for parameter in subject.module.parameters()),
        held=first.held,
        activations_bytes=first.activations_bytes,
        flops=first.flops,
        gradients=first.gradients or [(first.held.gradients_bytes, 1.0)],
        phases={crowd: rank.phases for crowd, rank in whole.items()},
        splits=splits,
        pipelines=pipelines,
        refused=refused,
        waiting=first.waiting,
        divides_batch=any(hasattr(callback, "check_before_launch") for callback in subject.callbacks),
    )


def _rounds(subject: PlannedModule, crowds: Sequence[int], tensor_parallel_size: int = 1) -> dict[int, LoneRank]:
    """For each crowd the median round; the crowds take turns, so that a busy moment affects all of them."""
    rounds: dict[int, list[LoneRank]] = {crowd: [] for crowd in crowds}
    for _ in range(_ROUNDS):
        for crowd in crowds:
            rounds[crowd].append(
                lone_steps(
                    subject.module,
                    subject.datamodule,
                    subject.trainer_settings,
                    callbacks=subject.callbacks,
                    device=subject.device,
                    crowd=crowd,
                    seconds=_SECONDS,
                    tensor_parallel_size=tensor_parallel_size,
                )
            )
    found = {}
    for crowd, ranks in rounds.items():
        ordered = sorted(ranks, key=lambda rank: rank.phases.step_s)
        middle, inner = ordered[len(ordered) // 2], ordered[1:-1] or ordered
        spread = (inner[-1].phases.step_s - inner[0].phases.step_s) / middle.phases.step_s
        adding_s = median(rank.phases.adding_s for rank in ranks)  # a small difference of large times
        found[crowd] = replace(middle, phases=replace(middle.phases, spread=spread, adding_s=adding_s))
    return found


def _part(size: int, ranks: Mapping[int, LoneRank]) -> SplitPart:
    one = next(iter(ranks.values()))
    return SplitPart(
        num_ranks=size,
        phases={crowd: rank.phases for crowd, rank in ranks.items()},
        collectives=one.collectives,
        held=one.held,
        activations_bytes=one.activations_bytes,
    )


def _pipelines(
    subject: PlannedModule, sizes: Sequence[int], names: Sequence[str], num_micro_batches: Sequence[int]
) -> tuple[list[PipelinePlan], dict[str, str]]:
    """The plans of all sizes and schedules, and why names have none."""
    schedules = {name: PIPELINES[name] for name in names if name in PIPELINES} or {"pipeline_1f1b": "1f1b"}
    options = subject.pipeline_options or PipelineStrategy(schedule="1f1b").pipeline_options
    try:
        plans, refused = pipeline_plans(
            [options.with_schedule(schedule) for schedule in dict.fromkeys(schedules.values())],
            sizes,
            subject.module,
            subject.datamodule,
            {**subject.trainer_settings, "accumulate_grad_batches": 1},
            device=subject.device,
            num_micro_batches=sorted({1, *(4 * size for size in sizes), *num_micro_batches}),
            callbacks=subject.callbacks,
        )
    except (PlanError, RuntimeError) as error:
        plans, refused = [], dict.fromkeys(product(schedules.values(), sizes), str(error))
    return plans, {
        f"{name} on {size} ranks": refused[schedule, size]
        for name, schedule in schedules.items()
        for size in sizes
        if (schedule, size) in refused
    }
