"""The run of ``lightning-multigpu plan --blocks``, with Lightning's command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from typing_extensions import override

from lightning_multigpu._lightning_internals import EndOfRun
from lightning_multigpu.commands.training import TrainingCLI
from lightning_multigpu.commands.usage import UsageError
from lightning_multigpu.planning.split_plan import SplitPlan
from lightning_multigpu.report.split_table import print_plan
from lightning_multigpu.strategies.steps.dry_run import QUIET_SETTINGS
from lightning_multigpu.strategies.tensor_parallel.hybrid import HybridStrategy
from lightning_multigpu.strategies.tensor_parallel.tensor_split import TensorSplitStrategy

SCHEMA_VERSION = 1


def run(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Plans for the ``arguments`` of ``fit``, and prints the plan and writes it as the ``options`` say."""
    SplitCLI(["fit", *arguments], options.json)
    return 0


class SplitCLI(TrainingCLI):
    """Runs ``fit`` on all ranks until the layers are split, and shows the plan; ``wanted`` is where it is written."""

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        self.save_config_callback = None
        given = self._get(self.config_init, "trainer", default={}).get("callbacks") or []
        of_batches = [each for each in given if hasattr(each, "check_before_launch")]
        return super().instantiate_trainer(**{**QUIET_SETTINGS, "callbacks": of_batches, **kwargs})

    def fit(self, model: pl.LightningModule, datamodule: pl.LightningDataModule | None = None, **_: Any) -> None:
        """Runs to the split; LightningCLI calls this in place of ``Trainer.fit``."""
        strategy = self.trainer.strategy
        if not isinstance(strategy, TensorSplitStrategy | HybridStrategy) or strategy.tensor_parallel_size == 1:
            raise UsageError(
                f"strategy={type(strategy).__name__} splits no layers here; pass --trainer.strategy=tensor_split"
            )
        shown = ShownPlan(self._wanted)
        strategy.on_split = shown
        self.trainer.fit(model, datamodule=datamodule)
        if not shown.is_over:
            raise UsageError(
                "the training loader has no batch to try the split on; check that fit would train on one "
                "(data, limit_train_batches, max_epochs, max_steps)"
            )


class ShownPlan:
    """Shows a plan on rank 0, writes it as JSON if there is a path, and ends the run on every rank."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.is_over = False

    def __call__(self, plan: SplitPlan) -> None:
        self.is_over = True
        self._show(plan)
        raise EndOfRun

    @rank_zero_only
    def _show(self, plan: SplitPlan) -> None:
        print_plan(Console(), plan)
        if self._path is not None:
            self._path.write_text(json.dumps({"schema_version": SCHEMA_VERSION, **asdict(plan)}, indent=2) + "\n")
            print(f"Plan as JSON: {self._path}")
