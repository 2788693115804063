"""The planning of ``lightning-multigpu plan``, with Lightning's command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_multigpu.bench.strategies.contenders import contender
from lightning_multigpu.commands.calibrate import FILE_NAME, cached_path, read, this_machine
from lightning_multigpu.commands.plans.measured_model import PlannedModule, ShortRunError, measured_model, model_of
from lightning_multigpu.commands.training import TrainingCLI
from lightning_multigpu.commands.usage import PROGRAM, UsageError
from lightning_multigpu.planning.scaling.machine import Machine, World, differences
from lightning_multigpu.planning.scaling.model_profile import ModelProfile
from lightning_multigpu.planning.scaling.presets import NODES, profile_of
from lightning_multigpu.planning.scaling.ranking import Ranking, ranked
from lightning_multigpu.planning.scaling.step_model import Candidate
from lightning_multigpu.registry import STRATEGIES
from lightning_multigpu.report import document, scaling_table
from lightning_multigpu.report.schema import ReportError
from lightning_multigpu.strategies.pipeline.strategy import PipelineStrategy

_NO_SPLITS = "a profile of one device does not say what split layers send; leave --profile out"


def run(arguments: Sequence[str], wanted: argparse.Namespace) -> int:
    """Predicts for the ``arguments`` of ``fit``, or for ``--example``, what the options ``wanted`` say.

    Raises:
        UsageError: a setting makes training or planning impossible.
    """
    if wanted.example is not None:
        print(
            "Nothing was measured here: the model is of Brown et al. 2020, the machine of data sheets, at half its peak"
        )
        node = NODES[wanted.preset]
        machine = _linked(node.machine(wanted.preset), wanted)
        profile = profile_of(wanted.example, node, wanted.batch or 0)
        ranking = _ranked(profile, machine, _candidates(wanted), _worlds(wanted, machine, machine.devices))
    else:
        torch.set_num_threads(1)  # ranks are forked from this process
        ranking = ScalingCLI(["fit", *arguments], wanted).ranking
    scaling_table.show(ranking, wanted.json)
    return 0


class ScalingCLI(TrainingCLI):
    """Makes the same objects as ``fit``, and plans instead of training, as the options of the plan say."""

    ranking: Ranking

    def fit(self, model: pl.LightningModule, datamodule: pl.LightningDataModule | None = None, **_: Any) -> None:
        """Plans; LightningCLI calls this in place of ``Trainer.fit``."""
        wanted, trainer = self._wanted, self.trainer
        strategy: Any = trainer.strategy
        device = (getattr(strategy, "parallel_devices", None) or [strategy.root_device])[0]
        machine = _linked(_calibrated(wanted, device.type), wanted)
        worlds = _worlds(wanted, machine, max(2, trainer.num_devices))
        candidates = _candidates(wanted, trainer.accumulate_grad_batches)
        subject = PlannedModule(
            module=model,
            datamodule=datamodule,
            trainer_settings=self.config_init["fit"]["trainer"],
            callbacks=trainer.callbacks,  # type: ignore[attr-defined]
            device=device,
            pipeline_options=strategy.pipeline_options if isinstance(strategy, PipelineStrategy) else None,
        )
        known = [world for world in worlds if 1 < world.size <= machine.cores(world)]
        crowds = sorted({machine.crowd(world) for world in known} - {1})
        splits = any(candidate.strategy == "tensor_split" for candidate in candidates)
        try:
            if wanted.profile is not None:
                profile = model_of(document.read(wanted.profile), refused={"tensor_split": _NO_SPLITS})
            else:
                print(f"Measures {type(model).__name__} on {device}; nothing is trained", file=sys.stderr, flush=True)
                tell = partial(print, " ", file=sys.stderr, flush=True)
                sizes = sorted({world.size for world in known if splits})
                profile = measured_model(subject, sizes, crowds, limit_bytes=machine.rank_memory_bytes, tell=tell)
        except (ShortRunError, ReportError, OSError) as error:
            raise UsageError(f"{wanted.profile}: {error}" if wanted.profile else str(error)) from error
        for crowd in crowds:
            if crowd not in profile.slowdown:
                print(
                    f"warning: how much slower {crowd} ranks of one machine compute side by side was not measured; "
                    "steps will be longer",
                    file=sys.stderr,
                )
        self.ranking = _ranked(profile, machine, candidates, worlds)


def _ranked(
    profile: ModelProfile, machine: Machine, candidates: Sequence[Candidate], worlds: Sequence[World]
) -> Ranking:
    try:
        return ranked(profile, machine, candidates, worlds)
    except ValueError as error:
        raise UsageError(f"nothing can be predicted: {error}") from error


def _worlds(wanted: argparse.Namespace, machine: Machine, devices: int) -> list[World]:
    usual = [1, 2, 4, 8] if machine.between is not None else [1]
    if machine.shares_cores:
        usual = sorted({1, *(each.world.nodes for each in machine.collectives)})
    return [World(n, d) for n in wanted.nodes or usual for d in wanted.devices or [devices]]


def _candidates(wanted: argparse.Namespace, accumulate: int = 1) -> list[Candidate]:
    return [
        Candidate(name, options, accumulate)
        for name, options in map(strategy_of, wanted.strategies or [row.name for row in STRATEGIES])
        if not name.endswith("_spawn")
    ]


def strategy_of(text: str) -> tuple[str, dict[str, Any]]:
    """A registered name and its options, from ``name`` or ``name:option=value``.

    Raises:
        UsageError: there is no such strategy or option.
    """
    name, _, rest = text.partition(":")
    if not rest:
        return name.lower(), {}
    try:
        found = contender(text)
    except ValueError as error:
        raise UsageError(str(error)) from error
    fixed = next((row.options for row in STRATEGIES if row.name == name.lower()), {})
    options = {option: value for option, value in found.options.items() if fixed.get(option) != value}
    return name.lower(), options


def _linked(machine: Machine, wanted: argparse.Namespace) -> Machine:
    return machine.with_link(wanted.link_gbit) if wanted.link_gbit else machine


def _calibrated(wanted: argparse.Namespace, device_type: str) -> Machine:
    paths = [wanted.machine] if wanted.machine else [Path(FILE_NAME), cached_path()]
    path = next((each for each in paths if each.is_file()), None)
    if path is None:
        raise UsageError(f"{paths[-1]}: there is no such file; run '{PROGRAM} calibrate', which takes a minute")
    try:
        machine = read(path)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if machine.device_type != device_type:
        raise UsageError(
            f"{path} is of {machine.device_type} devices, and the configuration trains on {device_type}; pass "
            f"--trainer.accelerator, or calibrate with --accelerator={device_type}"
        )
    for difference in differences(machine, this_machine(device_type)):
        print(f"warning: {path}: {difference}; calibrate again for better predictions", file=sys.stderr)
    return machine
