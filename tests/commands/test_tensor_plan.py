"""``lightning-multigpu plan --blocks``: what would be split, without training."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lightning_multigpu.cli import main
from lightning_multigpu.commands.plans.split_cli import SCHEMA_VERSION
from tests.launch import job

pytestmark = [
    # LightningCLI itself calls what jsonargparse 5 will remove, and jsonargparse tells so in two warnings.
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
]

MODEL = (
    "--model=examples.language_model.ByteGPT", "--model.width=16", "--model.num_layers=2", "--model.num_heads=4",
    "--model.context=8", "--data=examples.language_model.TextData", "--data.context=8", "--data.batch_size=4",
    "--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.max_epochs=1",
)  # fmt: skip
ROOT = str(Path(__file__).parents[2])


def planned(directory: Path, *options: str) -> tuple[Any, subprocess.CompletedProcess[str]]:
    """What a plan writes, and its process."""
    command = ("-m", "lightning_multigpu", "plan", *MODEL, *options, "--json=a.json")
    finished = job.run(str(directory), *command, cwd=directory, PYTHONPATH=ROOT)
    assert finished.returncode == 0, finished.stderr
    return json.loads((directory / "a.json").read_text()), finished


@pytest.mark.launch
def test_the_plan_of_a_language_model(tmp_path: Path) -> None:
    plan, finished = planned(tmp_path, "--blocks", "--trainer.strategy=tensor_split")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"], "no log, no checkpoint"
    assert (plan["schema_version"], plan["num_ranks"], plan["whole"]) == (SCHEMA_VERSION, 2, [])
    found = {blocks["shape"]: blocks for blocks in plan["blocks"]}
    assert {shape: blocks["num_blocks"] for shape, blocks in found.items()} == {
        "vocabulary": 1,
        "attention": 2,
        "first, second": 2,
    }
    output_bytes = 4 * 4 * 8 * 16
    for shape in ("attention", "first, second"):
        assert found[shape]["activation_bytes"] == output_bytes
        each = {"operation": "all_reduce", "count": 1, "size_bytes": output_bytes, "sent_bytes": output_bytes}
        assert found[shape]["traffic"] == [{"direction": way, **each} for way in ("forward", "backward")]
    feed_forward = 4 * (2 * 4 * 16 * 16 + 5 * 16)
    assert found["first, second"]["whole_bytes"] == 2 * feed_forward
    assert found["first, second"]["rank_bytes"] == feed_forward + 4 * 16, "the bias of the row layer is whole"
    whole, first, second = plan["one_device"], *plan["ranks"]
    for key in ("parameters_bytes", "gradients_bytes", "optimizer_bytes"):
        assert 0.5 * whole[key] < first[key] == second[key] < 0.6 * whole[key]
    assert whole["optimizer_bytes"] == 2 * whole["parameters_bytes"]
    assert "  2 x attention: model.blocks.*" in finished.stdout or "  2 x attention: blocks.*" in finished.stdout
    assert "1.00 x two all-reduces of the output" in finished.stdout
    assert finished.stdout.count("Each split layer over 2 ranks") == 1


@pytest.mark.launch
def test_the_plan_of_stages(tmp_path: Path) -> None:
    """Each of four ranks holds its part of its stage's layers."""
    plan, _ = planned(tmp_path, "--blocks", "--trainer.devices=4", "--trainer.strategy=hybrid")
    held = [rank["parameters_bytes"] for rank in plan["ranks"]]
    assert len(held) == 4
    assert max(held) < 0.45 * plan["one_device"]["parameters_bytes"]


def test_another_strategy_is_refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--blocks", *MODEL, "--trainer.strategy=ring_ddp"]) == 2
    refusal = "strategy=RingDDPStrategy splits no layers here; pass --trainer.strategy=tensor_split"
    assert refusal in capsys.readouterr().err


@pytest.mark.launch
def test_the_time_of_stages_is_that_of_split_layers(tmp_path: Path) -> None:
    """Two processes measure what four would train: half of each layer, and messages of half of the tokens."""
    plans = {}
    for name, of_strategy in {
        "whole": ("--trainer.strategy=pipeline_1f1b",),
        "split": (
            "--trainer.devices=4",
            "--trainer.strategy=lightning_multigpu.HybridStrategy",
            "--trainer.strategy.tensor={sequence_split: true}",
            "--strategies=pipeline_1f1b",
        ),
    }.items():
        plans[name], finished = planned(tmp_path, *of_strategy, "--micro-batches=2", "--link-gbit=0.001")
        assert finished.stdout.count("Pipeline over ") == 1, "the first rank prints"
        assert "Traceback" not in finished.stderr
    assert "on 2 x 2 ranks" in finished.stdout
    assert "Measures the layers on 2 devices that split them" in finished.stderr
    assert "activations between the blocks of blocks are split along dimension 1" in finished.stdout
    whole, split = (plans[name]["plans"][0] for name in ("whole", "split"))
    assert plans["split"]["tensor_parallel_size"] == 2
    assert [stage["rank"] for stage in split["stages"]] == [memory["rank"] for memory in split["memory"]] == [2, 0]
    message_s = 2 * 8 * 16 * 4 * 8 / 1e6
    for before, after in zip(whole["stages"], split["stages"], strict=True):
        assert 0.5 * before["parameters_bytes"] < after["parameters_bytes"] < 0.6 * before["parameters_bytes"]
        assert (before["transfer_s"], after["transfer_s"]) == pytest.approx((message_s, message_s / 2))
    for before, after in zip(whole["memory"], split["memory"], strict=True):
        for key in ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes"):
            assert after[key] < 0.7 * before[key], key
    assert 0 < split["relative_throughput"] <= plans["split"]["one_device_s"] / split["step_s"] * (1 + 1e-9)
