"""What the profile of a real fit says about a pipeline: its passes, its bubble, and what each stage holds."""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_multigpu import PipelineStrategy
from lightning_multigpu.callbacks import ProfilerReport
from lightning_multigpu.planning.pipelines.pipeline_prediction import PlannedMemory
from lightning_multigpu.strategies.pipeline import pipeline_planner
from tests.strategies.tasks import Case, Classifier, dataset, fit_module, make_strategy
from tests.world import World

WIDTH = 32
FLOAT32 = Case(max_epochs=1, precision="32-true")


class Deep(L.LightningModule):
    """Eight equal layers; each keeps its input, which the one before keeps as well, and what is inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(8))
        )
        self.register_buffer("scale", torch.ones(64, WIDTH))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch.clone().requires_grad_() * self.scale[: len(batch)]  # type: ignore[index]
        return self.layers(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def profiled(
    batches: int = 5,
    *,
    active: int = 5,
    activations: bool = False,
    module: type[Deep] = Deep,
    ranks: int = 2,
    **options: Any,
) -> Any:
    """The profile of a fit of some batches of 64 samples, on rank 0."""
    report = {"print_report": False, "write_files": False, "activations": activations}
    callback = ProfilerReport(wait=0, warmup=0, active=active, **report)
    data: Any = DataLoader([torch.ones(64, WIDTH)] * batches, batch_size=None)  # type: ignore[arg-type]
    fit_module(module(), PipelineStrategy(**options), ranks, FLOAT32, data, callbacks=[callback])
    return callback.profile


def passes_of(of_rank: dict[str, Any]) -> tuple[int, ...]:
    """The number of forward, backward and weight passes of a rank in its newest step."""
    timeline = of_rank["stages"]["steps"][-1]["timeline"]
    kinds = [kind for kind, *_ in {(i["kind"], i["stage"], i["micro_batch"]) for i in timeline}]
    return tuple(kinds.count(kind) for kind in ("forward", "backward", "weight"))


@pytest.mark.parametrize(
    ("schedule", "balance", "count", "passes", "theory"),
    [
        ("gpipe", "parameters", 6, (6, 6, 0), 1 / 7),
        ("1f1b", "memory", 6, (6, 6, 0), 1 / 7),  # split again when it is measured
        ("interleaved", "parameters", 4, (8, 8, 0), 1 / 9),
        ("zero_bubble", "parameters", 4, (8, 8, 8), 1 / 25),
    ],
)
def test_passes_times_and_memory_of_each_rank(
    schedule: Any, balance: Any, count: int, passes: Any, theory: float, world2: World
) -> None:
    profile, _ = world2.run(profiled, schedule=schedule, balance=balance, num_micro_batches=count)
    [pipeline] = profile["pipelines"]
    assert (pipeline["schedule"], pipeline["num_micro_batches"]) == (schedule, count)
    assert 0 < pipeline["bubble"] < 1
    assert pipeline["theoretical_bubble"] == pytest.approx(theory)
    assert [entry["rank"] for entry in pipeline["ranks"]] == [1, 0]
    for entry in pipeline["ranks"]:
        assert 0 < entry["bubble"] < 1
        seconds = entry["seconds"]
        assert sum(seconds.values()) == pytest.approx(pipeline["wall_s"])
        assert seconds["idle"] >= 0
        assert min(seconds[kind] for kind in ("forward", "backward", "send", "receive")) > 0
        assert (seconds["weight"] > 0) == (schedule == "zero_bubble")
    # The last rank has nothing to do until the first micro-batch has come.
    last = pipeline["ranks"][1]
    assert last["bubble"] * pipeline["wall_s"] >= last["seconds"]["receive"]
    assert [passes_of(rank) for rank in profile["ranks"]] == [passes, passes]
    held = sum(parameter.numel() * 4 for parameter in Deep().parameters()) / 2
    for rank in profile["ranks"]:
        assert rank["memory"]["parameters_bytes"] == rank["memory"]["gradients_bytes"] == held
        assert rank["memory"]["optimizer_bytes"] == 2 * held + 4 * 4 * 4  # a step count of each tensor of four layers
        predicted = {"parameters_bytes": held, "gradients_bytes": held, "optimizer_bytes": 2 * held}
        assert rank["stages"]["predicted"] == predicted


class Loading(Deep):
    def train_dataloader(self) -> Any:
        return DataLoader([torch.ones(64, WIDTH)], batch_size=None)  # type: ignore[arg-type]


def predicted(schedule: Any, again: Any) -> list[PlannedMemory]:
    """By a plan of one round of measurements, which changes times only."""
    options = PipelineStrategy(schedule=schedule, activation_checkpointing=again).pipeline_options
    given: Any = {"device": torch.device("cpu"), "num_micro_batches": [16]}
    settings = {"accelerator": "cpu", "max_epochs": 1, "use_distributed_sampler": False}
    with mock.patch.object(pipeline_planner, "NUM_ROUNDS", 1):
        [plan], _ = pipeline_planner.pipeline_plans([options], [2], Loading(), None, settings, **given)
    return list(plan.memory)


# Of a micro-batch of 4 samples the first stage's four layers keep the input, and what follows tanh, which is four times
# as much: those of all 16 micro-batches at once, or of as many as there are ranks. The module's buffer does not count.
INPUT, INSIDE = 4 * 4 * WIDTH * 4, 4 * 4 * 4 * WIDTH * 4


@pytest.mark.parametrize(
    ("schedule", "again", "of_first"),
    [
        ("gpipe", False, 16 * (INPUT + INSIDE)),
        ("1f1b", False, 2 * (INPUT + INSIDE)),
        ("1f1b", True, 2 * INPUT),
        ("1f1b", ["layers.4"], 2 * (INPUT + INSIDE)),
        ("interleaved", ["layers.1", "layers.6"], None),
    ],
)
def test_what_a_plan_predicts_is_kept(schedule: str, again: Any, of_first: int | None, world2: World) -> None:
    memory = predicted(schedule, again)
    options = {"num_micro_batches": 16, "schedule": schedule, "activation_checkpointing": again}
    profile, _ = world2.run(profiled, 4, active=1, activations=True, **options)
    measured = [rank["memory"]["activations_bytes"] for rank in reversed(profile["ranks"])]
    assert of_first in (None, measured[0])
    assert [rank.activations_bytes for rank in memory] == measured
    ranks = [True, True] if again is True else [bool(again) and schedule == "interleaved", bool(again)]
    assert [rank.recomputed_bytes for rank in memory] == [INSIDE // 4 * has for has in ranks]


def test_two_pipelines_side_by_side(world4: World) -> None:
    profile, *_ = world4.run(profiled, num_micro_batches=4, pipeline_parallel_size=2, ranks=4)
    assert [[entry["rank"] for entry in pipeline["ranks"]] for pipeline in profile["pipelines"]] == [[1, 0], [3, 2]]


def test_too_few_batches_for_a_time(world2: World) -> None:
    profile, _ = world2.run(profiled, 1, active=1, num_micro_batches=4)
    assert "pipelines" not in profile
    assert all(rank["memory"]["gradients_bytes"] > 0 for rank in profile["ranks"])


class Frozen(Deep):
    """The first stage has nothing to train, and no gradient comes back to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[:4].requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()


def test_a_stage_without_gradients_has_no_backward_passes(world2: World) -> None:
    profile, _ = world2.run(profiled, module=Frozen, num_micro_batches=4)
    last, first = profile["ranks"]
    assert (passes_of(first)[:2], passes_of(last)[1]) == ((4, 0), 4)
    assert first["memory"]["gradients_bytes"] == 0


def two_fits() -> dict[str, Any]:
    callback = ProfilerReport(wait=0, warmup=0, active=1, print_report=False, write_files=False)
    for strategy in (PipelineStrategy(), make_strategy("ring_ddp")):
        data = DataLoader(dataset(8), batch_size=4)
        fit_module(Classifier(), strategy, 2, Case(max_epochs=1), data, callbacks=[callback])
    return callback.profile or {}


def test_a_later_fit_without_a_pipeline_has_no_stages(world2: World) -> None:
    profile = world2.run(two_fits)[0]
    assert [rank["stages"] for rank in profile["ranks"]] == [None, None]
