"""What a pipeline cannot do with a module, said before anything is trained; and how it was split."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import Callback, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import LBFGS, Optimizer

from lightning_multigpu._lightning_internals import draws_graph
from lightning_multigpu.engine.pipeline.splitting.chain import Chain
from lightning_multigpu.engine.pipeline.stages.runner import LOOPED_SCHEDULES

if TYPE_CHECKING:
    import lightning.pytorch as pl


def check_module(module: pl.LightningModule) -> None:
    """The module leaves backward to Lightning.

    Raises:
        ValueError: it does not.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ValueError(
            f"{name}.automatic_optimization=False: a pipeline runs backward within its schedule, so that manual "
            "optimization is not possible; use automatic optimization, or another strategy"
        )
    if is_overridden("backward", module):
        raise ValueError(f"{name} overrides backward, which a pipeline's schedule calls by itself; remove it")
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ValueError(f"{name}.training_step takes dataloader_iter; a pipeline needs the batch: take batch instead")


def check_callbacks(callbacks: Iterable[Callback]) -> None:
    """No callback keeps a copy of the whole model, or compares all weights.

    Raises:
        ValueError: one does.
    """
    for callback in callbacks:
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ValueError(
                f"callbacks=[{type(callback).__name__}()] averages a copy of the whole model, which no stage of a "
                "pipeline has; leave it out, or use ring_ddp"
            )
        if isinstance(callback, ModelPruning):
            raise ValueError(
                f"callbacks=[{type(callback).__name__}()] chooses among all weights, which no stage of a pipeline has; "
                "leave it out, or use ring_ddp"
            )


def check_loggers(loggers: Iterable[Logger], module: pl.LightningModule) -> None:
    """No logger runs the whole module by itself.

    Raises:
        ValueError: one does.
    """
    if module.example_input_array is not None and any(draws_graph(logger) for logger in loggers):
        raise ValueError(
            "log_graph=True of a logger runs the whole module, which no stage of a pipeline has; pass log_graph=False"
        )


def check_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Every optimizer works parameter by parameter.

    Raises:
        ValueError: one does not.
    """
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ValueError(
            "LBFGS works on all parameters at once, and a pipeline has them on different ranks; use an optimizer that "
            "works parameter by parameter, such as SGD or AdamW"
        )


def check_stages_per_rank(schedule: str, stages_per_rank: int | None) -> None:
    """The schedule takes so many stages a rank.

    Raises:
        ValueError: it does not.
    """
    looped = schedule in LOOPED_SCHEDULES
    if stages_per_rank is not None and (stages_per_rank > 1) != looped:
        fix = "pass 2 or more" if looped else f"leave it out, or use one of the schedules {', '.join(LOOPED_SCHEDULES)}"
        raise ValueError(f"stages_per_rank={stages_per_rank} under schedule={schedule!r}; {fix}")


def check_activation_checkpointing(choice: object, schedule: str) -> None:
    """``choice`` is a bool or a list of classes and names, and the schedule's backward can compute layers again.

    Raises:
        ValueError: it is not, or it cannot.
    """
    if isinstance(choice, bool):
        pass
    elif isinstance(choice, str) or not isinstance(choice, Sequence):
        raise ValueError(
            f"activation_checkpointing={choice!r} is neither a bool nor a list; pass True for all layers, or a list of "
            "their classes or names, such as ['Block']"
        )
    elif not all(isinstance(entry, str | type) for entry in choice):
        raise ValueError(
            f"activation_checkpointing={choice!r}: pass classes, names of classes, or names of layers only"
        )
    if choice and schedule == "zero_bubble":
        raise ValueError(
            "activation_checkpointing under schedule='zero_bubble', whose backward comes in two parts: layers would be "
            "computed again for each group of their parameters; use schedule='interleaved', or leave it out"
        )


def check_split_points(split_points: object, balance: object, activation_checkpointing: object) -> None:
    """``split_points`` is None or a list of different names, and no other option splits as well.

    Raises:
        ValueError: it is not, or one does.
    """
    if split_points is None:
        return
    if isinstance(split_points, str) or not isinstance(split_points, Sequence):
        raise ValueError(f"split_points={split_points!r} is no list; pass names of submodules, such as ['net.decoder']")
    names = list(split_points)
    if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise ValueError(
            f"split_points={names!r}: pass one or more different names of submodules, such as ['net.decoder']"
        )
    if balance != "parameters":
        raise ValueError(f"balance={balance!r} and split_points={names!r} both split the module; leave one out")
    if not isinstance(activation_checkpointing, bool):
        raise ValueError(
            f"activation_checkpointing={activation_checkpointing!r}: between split_points there are no layers to name; "
            "pass True for all"
        )


def check_num_split_points(split_points: Sequence[str], num_ranks: int, stages_per_rank: int) -> None:
    """The points make as many stages as there are.

    Raises:
        ValueError: they do not.
    """
    num_stages = num_ranks * stages_per_rank
    if len(split_points) + 1 != num_stages:
        raise ValueError(
            f"split_points={list(split_points)!r} makes {len(split_points) + 1} stages, and {num_ranks} ranks with "
            f"{stages_per_rank} each have {num_stages}; name {num_stages - 1} submodules, or change devices"
        )


def describe_split(chain: Chain, bounds: Sequence[tuple[int, int]], ranks: Sequence[int]) -> str:
    """The stages as a few lines of text."""
    sizes = chain.parameter_bytes()
    lines = [f"Pipeline over {chain.describe()} in {len(bounds)} stages:"]
    for stage, (start, stop) in enumerate(bounds):
        layers, size_mb = chain.describe_layers(start, stop), sum(sizes[start:stop]) / 1e6
        lines.append(f"  stage {stage} on rank {ranks[stage % len(ranks)]}: {layers}, {size_mb:.3g} MB of parameters")
    return "\n".join(lines)
