"""The run of ``lightning-multigpu plan --micro-batches``, with Lightning's command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Trainer
from rich.console import Console
from typing_extensions import override

from lightning_multigpu.commands.plans.plan import SCHEDULES
from lightning_multigpu.commands.training import TrainingCLI
from lightning_multigpu.commands.usage import UsageError
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.planning.pipelines.pipeline_prediction import PipelinePlans
from lightning_multigpu.planning.pipelines.stage_costs import LinkCost
from lightning_multigpu.report.prediction_table import as_json, picture, print_plans
from lightning_multigpu.strategies.pipeline.pipeline_planner import PipelinePlanner, PlanError
from lightning_multigpu.strategies.pipeline.strategy import PipelineStrategy

SCHEMA_VERSION = 2


def run(arguments: Sequence[str], wanted: argparse.Namespace) -> int:
    """Plans for the ``arguments`` of ``fit``, and prints and writes the plans as the options ``wanted`` say."""
    cli = PlanningCLI(["fit", *arguments], wanted)
    if not cli.trainer.is_global_zero:  # another rank of a tensor group, whose first one prints
        return 0
    print_plans(Console(file=sys.stdout), cli.plans, wanted.link_gbit)
    if wanted.json is not None:
        document = {"schema_version": SCHEMA_VERSION, **as_json(cli.plans, wanted.link_gbit)}
        wanted.json.write_text(json.dumps(document, indent=2) + "\n")
        print(f"Plans as JSON: {wanted.json}")
    if wanted.picture is not None:
        wanted.picture.write_bytes(picture(cli.plans, wanted.picture.suffix))
        print(f"Picture: {wanted.picture}")
    return 0


class PlanningCLI(TrainingCLI):
    """Makes the same objects as ``fit``, and plans instead of training, as the options of the plan say."""

    plans: PipelinePlans

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        given, names = self._get(self.config_init, "trainer", default={}).get("strategy"), self._wanted.strategies
        if names and not (isinstance(given, PipelineStrategy) or str(given).lower() in (*SCHEDULES, "hybrid")):
            kwargs["strategy"] = names[0]
        return super().instantiate_trainer(**kwargs)

    def fit(self, model: pl.LightningModule, datamodule: pl.LightningDataModule | None = None, **_: Any) -> None:
        """Plans; LightningCLI calls this in place of ``Trainer.fit``."""
        wanted, names = self._wanted, self._wanted.strategies or ()
        numbers = wanted.micro_batches and [*wanted.micro_batches, *([1] if "model_parallel" in names else [])]
        link = LinkCost(0.0, 8e-9 / wanted.link_gbit if wanted.link_gbit else 0.0)
        if self.trainer.is_global_zero:
            size = getattr(self.trainer.strategy, "tensor_parallel_size", 1)
            where = "one device" if size == 1 else f"{size} devices that split them"
            print(f"Measures the layers on {where}, in several rounds; nothing is trained", file=sys.stderr, flush=True)
        try:
            schedules = list(dict.fromkeys(SCHEDULES[name] for name in names))
            planner = PipelinePlanner.of_trainer(
                self.trainer, schedules=schedules, num_micro_batches=numbers, link=link
            )
            self.plans = found = planner.run(model, datamodule, self.config_init["fit"]["trainer"])
        except (PlanError, PipelineError) as error:
            raise UsageError(str(error)) from error
        if "model_parallel" in names:  # gpipe with one micro-batch, and the others as they were asked for
            usual = wanted.micro_batches or [plan.num_micro_batches for plan in found.plans]
            asked = {(SCHEDULES[name], m) for name in names for m in ([1] if name == "model_parallel" else usual)}
            found.plans = [plan for plan in found.plans if (plan.schedule, plan.num_micro_batches) in asked]
