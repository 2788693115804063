"""What the profile of a real fit says about a pipeline: its passes, its bubble, and what each stage holds."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_multigpu import PipelineStrategy
from lightning_multigpu.callbacks import ProfilerReport
from lightning_multigpu.planning.pipelines.stage_costs import PlannedMemory
from lightning_multigpu.planning.pipelines.timeline import Timeline, bubble, usage
from lightning_multigpu.report.document import RunDocument
from lightning_multigpu.report.pipelines import TimedPipeline
from lightning_multigpu.report.schema import from_json
from tests.strategies.tasks import Case, fit_module
from tests.world import World

WIDTH = 32
QUIET: Any = {"print_table": False, "write_file": False}
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

    def train_dataloader(self) -> Any:
        return DataLoader([torch.ones(64, WIDTH)], batch_size=None)  # type: ignore[arg-type]


def profiled(
    batches: int = 5, *, active: int = 5, activations: bool = False, module: type[Deep] = Deep, **options: Any
) -> Any:
    callback = ProfilerReport(wait=0, active=active, activations=activations, **QUIET)
    data: Any = DataLoader([torch.ones(64, WIDTH)] * batches, batch_size=None)  # type: ignore[arg-type]
    fit_module(module(), PipelineStrategy(**options), 2, FLOAT32, data, callbacks=[callback])
    return callback.report


def pipelines_of(report: Any) -> list[TimedPipeline]:
    return list(from_json(RunDocument, report).profile.pipelines)  # type: ignore[union-attr]


def passes_of(timeline: Timeline) -> tuple[int, ...]:
    """The number of forward, backward and weight passes of a rank."""
    kinds = [kind for kind, *_ in {(i.kind, i.stage, i.micro_batch) for i in timeline}]
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
    report, _ = world2.run(profiled, schedule=schedule, balance=balance, num_micro_batches=count)
    [pipeline] = pipelines_of(report)
    assert (pipeline.schedule, pipeline.num_micro_batches, pipeline.ranks) == (schedule, count, [1, 0])
    assert bubble(pipeline.theory) == pytest.approx(theory)
    for used in usage(pipeline.timelines):
        assert 0 < used.bubble < 1
        assert used.idle_s >= 0
        assert min(used.seconds[kind] for kind in ("forward", "backward", "send", "receive")) > 0
        assert (used.seconds["weight"] > 0) == (schedule == "zero_bubble")
    # The last rank has nothing to do until the first micro-batch has come.
    assert used.bubble * used.wall_s >= used.seconds["receive"]
    assert [passes_of(timeline) for timeline in pipeline.timelines] == [passes, passes]
    held = sum(parameter.numel() * 4 for parameter in Deep().parameters()) / 2
    for memory in report["memory"]:
        assert memory["parameters_bytes"] == memory["gradients_bytes"] == held
        assert memory["optimizer_bytes"] == 2 * held + 4 * 4 * 4  # a step count of each tensor of four layers


def predicted(schedule: Any, again: Any) -> list[PlannedMemory]:
    """By a profile of one device."""
    callback = ProfilerReport(wait=0, active=1, for_plan=True, **QUIET)
    callback.pipeline_options = PipelineStrategy(activation_checkpointing=again).pipeline_options
    data: Any = DataLoader([torch.ones(64, WIDTH)] * 2, batch_size=None)  # type: ignore[arg-type]
    fit_module(Deep(), None, 1, FLOAT32, data, callbacks=[callback])
    model = from_json(RunDocument, callback.report).profile.ranks[0].model  # type: ignore[union-attr]
    assert model is not None
    assert model.chain is not None
    return list(model.chain.plan(schedule, 2, 1 + (schedule == "interleaved"), 16, 64, "parameters").memory)


# Of a micro-batch of 4 samples the first stage's four layers keep the input, and what follows tanh, which is four times
# as much: those of all 16 micro-batches at once, or of as many as there are ranks. The module's buffer does not count.
INPUT, INSIDE = 4 * 4 * WIDTH * 4, 4 * 4 * 4 * WIDTH * 4


@pytest.mark.parametrize(
    ("schedule", "again", "of_first"),
    [
        ("gpipe", False, 16 * (INPUT + INSIDE)),
        ("1f1b", False, 2 * (INPUT + INSIDE)),
        ("1f1b", True, 2 * INPUT),
        ("interleaved", ["layers.1", "layers.6"], None),
    ],
)
def test_what_a_plan_predicts_is_kept(schedule: str, again: Any, of_first: int | None, world2: World) -> None:
    memory = predicted(schedule, again)
    options = {"num_micro_batches": 16, "schedule": schedule, "activation_checkpointing": again}
    report, _ = world2.run(profiled, 4, active=1, activations=True, **options)
    measured = [memory["activations_bytes"] for memory in reversed(report["memory"])]
    assert of_first in (None, measured[0])
    assert [rank.activations_bytes for rank in memory] == measured
    ranks = [True, True] if again is True else [bool(again) and schedule == "interleaved", bool(again)]
    assert [rank.recomputed_bytes for rank in memory] == [INSIDE // 4 * has for has in ranks]


class Frozen(Deep):
    """The first stage has nothing to train, and no gradient comes back to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[:4].requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()


def test_a_stage_without_gradients_has_no_backward_passes(world2: World) -> None:
    report, _ = world2.run(profiled, module=Frozen, num_micro_batches=4)
    [pipeline] = pipelines_of(report)
    first, last = map(passes_of, pipeline.timelines)
    assert (first[:2], last[1]) == ((4, 0), 4)
    assert report["memory"][1]["gradients_bytes"] == 0
