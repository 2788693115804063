"""What the planner of pipelines predicts and refuses, and that it leaves everything alone."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning

from lightning_multigpu.callbacks import GlobalBatchSize
from lightning_multigpu.planning.pipelines.pipeline_prediction import PipelinePlan
from lightning_multigpu.strategies.pipeline import pipeline_planner
from lightning_multigpu.strategies.pipeline.pipeline_planner import PlanError, pipeline_plans
from lightning_multigpu.strategies.pipeline.strategy import PipelineStrategy
from tests.commands.planned import LAYERS, SAMPLES, WIDTH, Data, Manual, Model, Residual, events

pytestmark = pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")

LAYER_BYTES = 4 * WIDTH * WIDTH
INPUT_BYTES = 4 * WIDTH
"""Of a sample, which each layer keeps."""


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One round; no process can be started."""
    monkeypatch.setattr(pipeline_planner, "NUM_ROUNDS", 1)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a process was about to be started")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    Model.made.clear()
    events.clear()
    yield
    Model.made.clear()


def planned(
    model: Model,
    numbers: Sequence[int] = (2,),
    *,
    schedules: Sequence[Any] = ("1f1b",),
    callbacks: Sequence[Any] = (),
    trainer: Any = None,
    **options: Any,
) -> list[PipelinePlan]:
    """The plans of two ranks."""
    of_first = PipelineStrategy(**{"module": "layers", "schedule": schedules[0], **options}).pipeline_options
    of_schedules = [of_first.with_schedule(schedule) for schedule in schedules]
    settings = {"accelerator": "cpu", "max_epochs": 1, **(trainer or {})}
    given: dict[str, Any] = {"device": torch.device("cpu"), "num_micro_batches": numbers, "callbacks": callbacks}
    plans, refused = pipeline_plans(of_schedules, [2], model, Data(), settings, **given)
    for reason in refused.values():
        raise PlanError(reason)
    return plans


def test_nothing_is_trained(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = Model()
    assert [plan.num_micro_batches for plan in planned(model, [1, 4])] == [1, 4]
    assert [*tmp_path.iterdir()] == []
    assert events == ["step"] * events.count("step") + ["teardown"]
    assert len(events) > 1
    assert model.steps == 0
    assert all(torch.equal(value, model.initial[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.distributed.is_initialized()


def test_the_stages_and_the_time_of_one_device() -> None:
    alone, plan, _, further = planned(Model(), [1, 2], schedules=["1f1b", "zero_bubble"])
    assert (further.schedule, len(further.stages)) == ("zero_bubble", 4)
    assert [stage.parameters_bytes for stage in plan.stages] == [2 * LAYER_BYTES] * 2
    assert [stage.output_bytes for stage in plan.stages] == [SAMPLES // 2 * INPUT_BYTES] * 2
    assert all(stage.forward_s > 0 and stage.backward_s > 0 for stage in plan.stages)
    assert alone.spread >= 0
    # What stands before the layers takes time on the first stage only.
    assert 0 < alone.one_device_s == pytest.approx(sum(s.forward_s + s.backward_s for s in alone.stages))


def test_batch_is_the_one_that_would_be_trained_on() -> None:
    """A configuration with GlobalBatchSize was planned with the batch size of its data, which fit does not use."""
    [plan] = planned(Model(), [4, 8], callbacks=[GlobalBatchSize(4)])
    assert plan.num_micro_batches == 4
    assert [stage.output_bytes for stage in plan.stages] == [INPUT_BYTES] * 2


@pytest.mark.parametrize(("optimizer", "states"), [("Adam", 2), ("SGD", 0)])
def test_memory_counts_what_a_rank_holds(optimizer: str, states: int) -> None:
    [plan] = planned(Model(optimizer), [4])
    before, behind = LAYER_BYTES, 4 * WIDTH
    # Under 1f1b the first stage has two micro-batches in memory. It keeps the inputs of "before" and of its two layers;
    # the last stage those of its two layers, of which one is what it has received, and that of "behind".
    for memory, (ends, kept) in zip(plan.memory, ((before, 2 * 3), (behind, 3)), strict=True):
        parameters = 2 * LAYER_BYTES + ends
        assert (memory.parameters_bytes, memory.gradients_bytes) == (parameters, parameters)
        assert memory.optimizer_bytes == states * parameters
        assert (memory.activations_bytes, memory.recomputed_bytes) == (kept * SAMPLES // 4 * INPUT_BYTES, 0)


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"balance": "time"}, None),
        ({"balance": "memory"}, [1, 3]),  # there are layers before them, and two micro-batches
        ({"balance": [1, 3]}, [1, 3]),
        ({"module": "auto", "split_points": ["layers.2"]}, [2, 2]),
    ],
)
def test_the_split_is_that_of_the_strategy(options: dict[str, Any], layers: list[int] | None) -> None:
    [plan] = planned(Model(), **options)
    found = [stage.parameters_bytes // LAYER_BYTES for stage in plan.stages]
    assert sum(found) == LAYERS
    assert layers in (None, found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_checkpointing": ["Block"]},
         "activation_checkpointing=['Block'] names no layer of 'layers', whose layers are of the classes Linear"),
        ({"schedules": ["interleaved"], "balance": [1, 3]}, "balance=[1, 3] has 2 entries for 4 stages"),
        ({"module": "auto", "split_points": ["layers.1", "layers.2"]},
         "makes 3 stages, and 2 ranks with 1 each have 2"),
        ({"module": "blocks"}, "module='blocks' is no part of the module; it must be an nn.Sequential"),
        ({"callbacks": [ModelPruning("l1_unstructured")]}, "chooses among all weights"),
        ({"trainer": {"limit_train_batches": 0}}, "the training loader has no batch to measure"),
        ({"model": Manual}, "Manual.automatic_optimization=False: a pipeline runs backward"),
        ({"model": Residual}, "the input of layer layers.1 is not the output of layer layers.0: "
         "something is computed between the two, such as a residual x + layer(x), and would be lost between stages; "
         "cut the forward pass around the layers, unchanged (a step that calls the layers itself needs a module with "
         "their loop in its forward): PipelineStrategy(split_points=['layers.2'])"),
        ({"optimizer": "LBFGS"}, "LBFGS works on all parameters at once"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused(options: dict[str, Any], message: str) -> None:
    options = {**options}
    model = options.pop("model", Model)
    module = model(*filter(None, [options.pop("optimizer", None)]))
    with pytest.raises(PlanError) as caught:
        planned(module, **options)
    assert message in str(caught.value)
    if model is not Residual:  # which only shows when the layers run
        assert "step" not in events
