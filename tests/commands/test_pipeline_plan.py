"""``lightning-multigpu plan --micro-batches``: what it predicts and refuses, and that it leaves everything alone."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

from lightning_multigpu.cli import main
from lightning_multigpu.strategies import option_checks
from lightning_multigpu.strategies.pipeline import pipeline_planner
from tests.commands.planned import LAYERS, SAMPLES, WIDTH, Model, events

pytestmark = [
    # LightningCLI itself calls what jsonargparse 5 will remove, and jsonargparse tells so in two warnings.
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
]

CONFIG = """
model: tests.commands.planned.Model
data: tests.commands.planned.Data
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  strategy:
    class_path: lightning_multigpu.PipelineStrategy
    init_args: {module: layers}
"""
LAYER_BYTES = 4 * WIDTH * WIDTH
INPUT_BYTES = 4 * WIDTH
"""Of a sample, which each layer keeps."""


@pytest.fixture(autouse=True)
def project(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with a configuration and nothing else; no process can be started."""
    (directory / "run.yaml").write_text(CONFIG)
    monkeypatch.setattr(option_checks, "usable_cores", lambda: 8)
    monkeypatch.setattr(pipeline_planner, "_ROUND_S", 0.01)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a process was about to be started")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    Model.made.clear()
    events.clear()
    yield directory
    Model.made.clear()


def planned(*options: str) -> dict[str, Any]:
    assert main(["plan", "--config=run.yaml", "--json=plan.json", *options]) == 0
    document: dict[str, Any] = json.loads(Path("plan.json").read_text())
    return document


def test_what_is_printed_and_that_nothing_is_trained(capsys: pytest.CaptureFixture[str], project: Path) -> None:
    assert main(["plan", "--micro-batches", "1", "4", "--config=run.yaml"]) == 0
    captured = capsys.readouterr()
    assert "Measures the layers on one device" in captured.err, "some minutes passed without a word"
    printed = captured.out
    assert re.search(r" activations *$", printed, re.MULTILINE), "the last column was cut off at 80 characters"
    first, second, third, *_ = printed.splitlines()
    assert first == "Pipeline over 'layers', 4 layers, on 2 ranks by balance='parameters'"
    assert second.startswith("measured on the first 8 samples; as a whole on one device they take ")
    assert third.endswith("messages between ranks take no time (--link-gbit sets a bandwidth)")
    for number in (1, 4):
        assert f"\n1f1b, M = {number}, for one micro-batch:\n  stage 0 on rank 1: layers 0 to 1, 2.05 kB of " in printed
    assert "\n  stage 1 on rank 0: layers 2 to 3, " in printed
    assert re.search(
        r"\n(fastest: 1f1b, M = |the machine is too noisy to choose: in 5 rounds of measurements )", printed
    )
    assert [path.name for path in project.iterdir()] == ["run.yaml"]
    [model] = Model.made
    assert events == ["step"] * events.count("step") + ["teardown"]
    assert len(events) > 1
    assert model.steps == 0
    assert all(torch.equal(value, model.initial[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.distributed.is_initialized()


def test_batch_is_the_one_that_would_be_trained_on(project: Path) -> None:
    """A configuration with GlobalBatchSize was planned with the batch size of its data, which fit does not use."""
    callback = "{class_path: lightning_multigpu.callbacks.GlobalBatchSize, init_args: {global_batch_size: 4}}"
    (project / "run.yaml").write_text(f"{CONFIG}  callbacks: [{callback}]\n")
    assert planned("--micro-batches=2")["batch_samples"] == 4
    beside_another = ("--trainer.devices=4", "--trainer.strategy.pipeline_parallel_size=2")
    assert planned("--micro-batches=2", *beside_another)["batch_samples"] == 2


def test_keys_of_the_document_and_the_picture(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned("--micro-batches", "1", "2", "--picture=plan.svg")
    assert {key: found[key] for key in list(found)[:7]} == {
        "schema_version": 2,
        "num_ranks": 2,
        "tensor_parallel_size": 1,
        "num_pipelines": 1,
        "balance": "parameters",
        "link_gbit": None,
        "batch_samples": SAMPLES,
    }
    assert list(found)[7:] == ["one_device_s", "waiting", "too_noisy", "plans"]
    alone, plan = found["plans"]
    assert list(plan) == [
        "module", "schedule", "num_micro_batches", "step_s", "bubble", "relative_throughput",
        "relative_throughput_range", "step_s_of_rounds", "stages", "memory", "may_be_fastest",
    ]  # fmt: skip
    assert (plan["module"], plan["schedule"], plan["num_micro_batches"]) == ("layers", "1f1b", 2)
    lowest, highest = plan["relative_throughput_range"]
    assert 0 < lowest <= plan["relative_throughput"] <= highest <= 2
    assert plan["relative_throughput"] <= found["one_device_s"] / plan["step_s"] * (1 + 1e-9)
    assert alone["may_be_fastest"] or plan["may_be_fastest"]
    assert len(plan["step_s_of_rounds"]) == 5
    assert [(stage["rank"], stage["layers"]) for stage in plan["stages"]] == [(1, [0, 2]), (0, [2, 4])]
    assert [stage["parameters_bytes"] for stage in plan["stages"]] == [2 * LAYER_BYTES] * 2
    assert all(stage["forward_s"] > 0 and stage["backward_s"] > 0 for stage in plan["stages"])
    # One micro-batch runs through all stages and back.
    assert alone["step_s"] == pytest.approx(sum(s["forward_s"] + s["backward_s"] for s in alone["stages"]))
    assert alone["bubble"] == pytest.approx(1 / 2)
    # What stands before the layers takes time on the first stage only.
    assert 0 < found["one_device_s"] == pytest.approx(alone["step_s"])
    # The picture has a panel a plan.
    assert capsys.readouterr().out.endswith("\nPlans as JSON: plan.json\nPicture: plan.svg\n")
    texts = [element.text or "" for element in ElementTree.parse("plan.svg").iter() if element.tag.endswith("text")]
    assert [text.partition(":")[0] for text in texts if text.startswith("1f1b")] == ["1f1b, M = 1", "1f1b, M = 2"]
    assert [text for text in texts if text.startswith("rank")] == ["rank 1", "rank 0"] * 2


@pytest.mark.parametrize(("optimizer", "states"), [("Adam", 2), ("SGD", 0)])
def test_memory_counts_what_a_rank_holds(optimizer: str, states: int) -> None:
    found = planned("--micro-batches=4", f"--model.optimizer={optimizer}")
    before, behind = LAYER_BYTES, 4 * WIDTH
    samples = SAMPLES // 4
    # Under 1f1b the first stage has two micro-batches in memory. It keeps the inputs of "before" and of its two layers;
    # the last stage those of its two layers, of which one is what it has received, and that of "behind".
    for memory, (rank, kept) in zip(found["plans"][0]["memory"], ((1, 2 * 3), (0, 3)), strict=True):
        parameters = 2 * LAYER_BYTES + (before if rank else behind)
        assert memory == {
            "rank": rank,
            "parameters_bytes": parameters,
            "gradients_bytes": parameters,
            "optimizer_bytes": states * parameters,
            "activations_bytes": kept * samples * INPUT_BYTES,
            "recomputed_bytes": 0,
        }


class Wide(nn.Module):
    """Keeps its input, and 8 times as much inside; takes 4 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 8 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.004)
        return self.layer(x).tanh()[:, :WIDTH]


class WideModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Wide() for _ in range(LAYERS)))


def test_layers_that_run_again_take_longer_and_keep_their_input() -> None:
    model = "--model=tests.commands.test_pipeline_plan.WideModel"
    plain, again = (
        planned(model, "--micro-batches=4", f"--trainer.strategy.activation_checkpointing={choice}")
        for choice in ("false", "true")
    )
    for before, after in zip(plain["plans"][0]["stages"], again["plans"][0]["stages"], strict=True):
        assert before["forward_s"] > 0.008
        assert before["backward_s"] < 0.008 < after["backward_s"]
    assert plain["one_device_s"] < 4 * 0.008, "one device keeps what is inside"
    assert again["one_device_s"] < 4 * 0.008
    samples = SAMPLES // 4 * INPUT_BYTES
    first, last = again["plans"][0]["memory"]
    assert (first["activations_bytes"], last["activations_bytes"]) == (2 * 3 * samples, 3 * samples)
    assert [rank["recomputed_bytes"] for rank in (first, last)] == [8 * samples] * 2
    assert plain["plans"][0]["memory"][1]["activations_bytes"] > 2 * 8 * samples


def test_a_bandwidth_makes_steps_longer() -> None:
    """Two samples of 64 bytes at 1 Mbit/s take 1.024 ms, one way."""
    [plan] = planned("--micro-batches=4", "--link-gbit=0.001")["plans"]
    assert [stage["transfer_s"] for stage in plan["stages"]] == pytest.approx([1.024e-3] * 2)
    assert plan["step_s"] > 4 * 1.024e-3


def test_usual_numbers_of_micro_batches_as_far_as_there_are_samples() -> None:
    for options, numbers in (((), [1, 2, 4, 8]), (("--trainer.strategy.num_micro_batches=3",), [1, 2, 3, 4, 8])):
        plans = planned("--micro-batches", *options)["plans"]
        assert [plan["num_micro_batches"] for plan in plans] == numbers


def test_schedules_beside_each_other() -> None:
    plans = planned("--micro-batches=4", "--strategies", "gpipe", "pipeline_zero_bubble")["plans"]
    assert [(plan["schedule"], len(plan["stages"])) for plan in plans] == [("gpipe", 2), ("zero_bubble", 4)]
    assert [stage["rank"] for stage in plans[1]["stages"]] == [1, 0, 1, 0]


def test_model_parallel_is_gpipe_with_one_micro_batch() -> None:
    """Beside another pipeline, gpipe with 2 and 4 micro-batches was not asked for."""
    plans = planned("--micro-batches", "2", "4", "--strategies", "model_parallel", "pipeline_1f1b")["plans"]
    found = [(plan["schedule"], plan["num_micro_batches"]) for plan in plans]
    assert found == [("gpipe", 1), ("1f1b", 2), ("1f1b", 4)]


@pytest.mark.parametrize("strategy", ["auto", "lightning_multigpu.RingDDPStrategy"])
def test_a_pipeline_takes_the_place_of_a_strategy_that_is_none(strategy: str) -> None:
    names = ("--strategies", "pipeline_1f1b", "gpipe")
    plans = planned(f"--trainer.strategy={strategy}", "--micro-batches=2", *names)["plans"]
    assert [(plan["schedule"], plan["module"]) for plan in plans] == [("1f1b", "layers"), ("gpipe", "layers")]


def test_a_plan_of_all_strategies_is_the_planners(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("lightning_multigpu.commands.plans.scaling_cli.run", lambda *a: asked.append(a) or 3)
    rest = ["--config=run.yaml", "--trainer.strategy=ring_ddp"]
    assert main(["plan", "--nodes", "1", "2", *rest, "--devices=4", "--strategies", "dp", "gpipe:balance=time"]) == 3
    [(arguments, options)] = asked
    assert (arguments, options.nodes, options.devices) == (rest, [1, 2], [4])
    assert options.strategies == ["dp", "gpipe:balance=time"]


@pytest.mark.parametrize("balance", ["time", "memory", "[1,3]"])
def test_the_split_is_that_of_the_strategy(balance: str) -> None:
    found = planned("--micro-batches=2", f"--trainer.strategy.balance={balance}")
    first, last = (stage["layers"] for stage in found["plans"][0]["stages"])
    cut = first[1] if balance == "time" else 1  # by memory: there are layers before them, and two micro-batches
    assert (first, last) == ([0, cut], [cut, LAYERS])
    assert str(found["balance"]).replace(" ", "") == balance


def test_each_of_several_pipelines_takes_a_batch_of_the_loader() -> None:
    """The plan was for half of the batch that each of the two trains on."""
    found = planned("--trainer.devices=4", "--trainer.strategy.pipeline_parallel_size=2", "--micro-batches=2")
    assert (found["num_ranks"], found["num_pipelines"], found["batch_samples"]) == (2, 2, SAMPLES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--trainer.strategy.activation_checkpointing=[Block]",
         "activation_checkpointing=['Block'] names no layer of 'layers', whose layers are of the classes Linear"),
        ("--micro-batches 2 9", "num_micro_batches=9: the first batch of a pipeline has 8 samples, and each "
         "micro-batch needs one; pass 8 or less, or a larger batch"),
        ("--blocks", "--micro-batches is no option with --blocks, which takes --json"),
        ("--nodes 2", "--nodes is no option with --micro-batches, which takes --strategies, --link-gbit, --pict"),
        ("--strategies gpipe ring_ddp", "--strategies=ring_ddp: with --micro-batches, pass names of pipelines, which "
         "are model_parallel, gpipe, pipeline_1f1b, pipeline_interleaved, pipeline_zero_bubble; their options are "),
        ("--strategies gpip", "strategy='gpip': there is no such strategy. Did you mean 'gpipe'?"),
        ("--strategies pipeline_zero_bubble --trainer.strategy.activation_checkpointing=true",
         "activation_checkpointing under schedule='zero_bubble', whose backward has two parts"),
        ("--strategies pipeline_interleaved --trainer.strategy.balance=[1,3]",
         "balance=[1, 3] has 2 entries for 4 stages"),
        ("--picture no/such.svg", "--picture=no/such.svg: there is no directory no; make it first"),
        ("--trainer.devices=1", "devices=1: a pipeline has a stage on each device and needs 2 or more; pass devices=2"),
        ("--trainer.strategy.module=auto --trainer.strategy.split_points=[layers.1,layers.2]",
         "makes 3 stages, and 2 ranks with 1 each have 2"),
        ("--trainer.strategy.module=blocks", "module='blocks' is no part of the module; it must be an nn.Sequential"),
        ("--trainer.strategy=ring_ddp", "strategy=RingDDPStrategy is no pipeline; pass strategy='pipeline_1f1b'"),
        ("--trainer.strategy=hybrid", "tensor_parallel_size=2: the plan is for 2 stages or more; pass pipeline_parall"),
        ("--trainer.strategy=auto --trainer.devices=1", "strategy=SingleDeviceStrategy is no pipeline; pass"),
        ("--trainer.callbacks=ModelPruning --trainer.callbacks.pruning_fn=l1_unstructured",
         "callbacks=[ModelPruning()] chooses among all weights"),
        ("--trainer.limit_train_batches=0", "the training loader has no batch to measure"),
        ("--trainer.max_epoch=1", "--trainer.max_epoch is not a setting. Did you mean '--trainer.max_epochs'?"),
        ("--model=tests.commands.planned.Residual", "the input of layer layers.1 is not the output of layer layers.0: "
         "something is computed between the two, such as a residual x + layer(x), and would be lost between stages; "
         "cut the forward pass around the layers, unchanged (a step that calls the layers itself needs a module with "
         "their loop in its forward): PipelineStrategy(split_points=['layers.2'])"),
        ("--model=tests.commands.planned.Manual", "Manual.automatic_optimization=False: a pipeline runs backward"),
        ("--model.optimizer=LBFGS", "LBFGS works on all parameters at once"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_in_one_message(
    options: str, message: str, capsys: pytest.CaptureFixture[str], project: Path
) -> None:
    assert main(["plan", "--config=run.yaml", "--micro-batches", *options.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = [line for line in captured.err.splitlines() if "error:" in line]
    assert line.startswith("lightning-multigpu plan: error: ")
    assert message in line
    assert "Traceback" not in captured.err
    if "Residual" not in options:  # which only shows when the layers run
        assert "step" not in events


def test_split_points_are_planned_as_they_are() -> None:
    points = ["--trainer.strategy.module=auto", "--trainer.strategy.split_points=[layers.2]"]
    (plan,) = planned(*points, "--micro-batches=2")["plans"]
    assert [stage["layers"] for stage in plan["stages"]] == [[0, 1], [1, 2]]
    assert [stage["parameters_bytes"] for stage in plan["stages"]] == [2 * LAYER_BYTES, (LAYERS - 2) * LAYER_BYTES]
