"""The planning of ``lightning-multigpu pipeline plan``, with Lightning's command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_multigpu.commands.training import TrainingCLI
from lightning_multigpu.commands.usage import UsageError
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.planning.pipelines.pipeline_prediction import PipelinePlans
from lightning_multigpu.planning.pipelines.stage_costs import LinkCost
from lightning_multigpu.strategies.pipeline.pipeline_planner import PipelinePlanner, PlanError


def planned(arguments: Sequence[str], wanted: argparse.Namespace) -> PipelinePlans | None:
    """The plans for the options ``wanted`` of ``pipeline plan`` and the ``arguments`` of ``fit``.

    None on the ranks of a tensor group but the first.
    """
    cli = PlanningCLI(arguments, wanted)
    return cli.plans if cli.trainer.is_global_zero else None


class PlanningCLI(TrainingCLI):
    """Makes the same objects as ``fit``, and plans instead of training.

    Args:
        arguments: options of ``fit``.
        wanted: the options of the plan.

    Attributes:
        plans: what was asked for.

    Raises:
        UsageError: a setting makes training or planning impossible.
    """

    plans: PipelinePlans

    def __init__(self, arguments: Sequence[str], wanted: argparse.Namespace) -> None:
        self._wanted = wanted
        super().__init__(["fit", *arguments])

    def fit(self, model: pl.LightningModule, datamodule: pl.LightningDataModule | None = None, **_: Any) -> None:
        """Plans; LightningCLI calls this in place of ``Trainer.fit``."""
        wanted = self._wanted
        link = LinkCost(0.0, 8e-9 / wanted.link_gbit if wanted.link_gbit else 0.0)
        if self.trainer.is_global_zero:
            size = getattr(self.trainer.strategy, "tensor_parallel_size", 1)
            where = "one device" if size == 1 else f"{size} devices that split them"
            print(f"Measures the layers on {where}, in several rounds; nothing is trained", file=sys.stderr, flush=True)
        try:
            planner = PipelinePlanner.of_trainer(
                self.trainer, schedules=wanted.schedules, num_micro_batches=wanted.num_micro_batches, link=link
            )
            self.plans = planner.run(model, datamodule, self.config_init["fit"]["trainer"])
        except (PlanError, PipelineError) as error:
            raise UsageError(str(error)) from error
