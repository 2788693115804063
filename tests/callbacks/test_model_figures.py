"""Layers that a ProfilerReport times for plans: what they cost, what is refused, and that all is left alone."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelPruning

from lightning_multigpu._lightning_internals import EndOfRun
from lightning_multigpu.callbacks.profile.model_figures import model_figures
from lightning_multigpu.planning.pipelines.stage_costs import PipelinePlan
from lightning_multigpu.report.rank_figures import ModelFigures
from lightning_multigpu.strategies.pipeline.pipeline_options import PipelineOptions
from lightning_multigpu.strategies.pipeline.strategy import PipelineStrategy
from tests.commands.planned import LAYERS, SAMPLES, WIDTH, Data, Manual, Model, events

LAYER_BYTES = 4 * WIDTH * WIDTH
INPUT_BYTES = 4 * WIDTH
"""Of a sample, which each layer keeps."""


@pytest.fixture(autouse=True)
def recorded() -> Iterator[None]:
    Model.made.clear()
    events.clear()
    yield
    Model.made.clear()


class _Trial(Callback):
    """Measures on the first batch, and ends the run there."""

    def __init__(self, options: PipelineOptions) -> None:
        self.options = options

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.found = model_figures(trainer, batch, batch_idx, self.options)
        raise EndOfRun


def figures(
    model: Model, *, callbacks: Sequence[Any] = (), schedule: Any = "1f1b", directory: Any = ".", **options: Any
) -> ModelFigures:
    trial = _Trial(PipelineStrategy(**{"module": "layers", "schedule": schedule, **options}).pipeline_options)
    settings = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "limit_val_batches": 0, "logger": False}
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    L.Trainer(**settings, **quiet, callbacks=[*callbacks, trial]).fit(model, Data())
    return trial.found


def planned(model: Model, numbers: Sequence[int] = (2,), **options: Any) -> list[PipelinePlan]:
    found = figures(model, **options)
    if found.chain is None:
        raise ValueError(found.refused)
    of_schedule = options.get("schedule", "1f1b"), 2, 1
    return [found.chain.plan(*of_schedule, n, found.samples, found.chain.balance) for n in numbers]


def test_nothing_is_trained(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = Model()
    assert len(planned(model, [1, 4])) == 2
    assert [*tmp_path.iterdir()] == []
    assert events == ["step"] * events.count("step") + ["teardown"]
    assert len(events) > 1
    assert model.steps == 0
    assert all(torch.equal(value, model.initial[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_stages_and_the_time_of_one_device() -> None:
    alone, plan = planned(Model(), [1, 2])
    assert [stage.parameters_bytes for stage in plan.stages] == [2 * LAYER_BYTES] * 2
    assert [stage.output_bytes for stage in plan.stages] == [SAMPLES // 2 * INPUT_BYTES] * 2
    assert all(stage.forward_s > 0 and stage.backward_s > 0 for stage in plan.stages)
    # What stands before the layers takes time on the first stage only.
    assert 0 < alone.one_device_s == pytest.approx(sum(s.forward_s + s.backward_s for s in alone.stages))


def test_gradients_are_ready_from_the_last_layer_on() -> None:
    found = figures(Model())
    assert [size for size, _ in found.gradients] == [4 * WIDTH, *[LAYER_BYTES] * 5]


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
        ({"balance": [1, 1, 2]}, "balance=[1, 1, 2] has 3 entries for 2 stages"),
        ({"module": "auto", "split_points": ["layers.1", "layers.2"]},
         "makes 3 stages, and 2 ranks with 1 each have 2"),
        ({"callbacks": [ModelPruning("l1_unstructured")]}, "chooses among all weights"),
        ({"model": Manual}, "Manual.automatic_optimization=False: a pipeline runs backward"),
        ({"optimizer": "LBFGS"}, "LBFGS works on all parameters at once"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused(options: dict[str, Any], message: str) -> None:
    options = {**options}
    model = options.pop("model", Model)
    module = model(*filter(None, [options.pop("optimizer", None)]))
    with pytest.raises(ValueError, match=re.escape(message)):
        planned(module, **options)
