"""``lightning-multigpu plan``: predictions of every strategy for a small module, from a machine that is made up."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from lightning_multigpu.cli import main
from lightning_multigpu.commands.plans import measured_model
from lightning_multigpu.commands.plans.measured_model import PlannedModule, ShortRun, ShortRunError
from lightning_multigpu.planning.pipelines.stage_costs import ChainFigures, MeasuredParts, PartCost
from lightning_multigpu.planning.pipelines.timeline import HeldBytes
from lightning_multigpu.registry import STRATEGIES
from lightning_multigpu.report.document import HeldMemory, Profile, ReportedWorld, TrainedModel
from lightning_multigpu.report.rank_figures import ModelFigures, RankFigures
from lightning_multigpu.report.schema import as_json
from tests.commands.planned import LAYERS, MACHINE, Model
from tests.report.profiles import report

pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

CONFIG: dict[str, Any] = {
    "model": "tests.commands.planned.Model",
    "data": "tests.commands.planned.Data",
    "trainer": {"accelerator": "cpu", "devices": 2, "max_epochs": 1, "accumulate_grad_batches": 2},
}
sizes: list[tuple[int, int]] = []
"""Ranks that split layers, and copies, of each run."""
NAMES = {row.name for row in STRATEGIES if not row.name.endswith("_spawn")}


def run(subject: PlannedModule, num_ranks: int = 1, copies: int = 1) -> ShortRun:
    """The run that there would be; tests/commands/test_short_run.py has some."""
    sizes.append((num_ranks, copies))
    if type(subject.module).__name__ == "Failing":
        raise ShortRunError("ZeroDivisionError: division by zero")
    held = 5184 // num_ranks
    parts = [PartCost(1e-5, 2e-5, 64, 64)] * (LAYERS + 2)
    each = HeldBytes(held // 8, held // 8, held // 4)
    chain = ChainFigures(
        name="layers", measured=[MeasuredParts(samples=n, parts=parts) for n in (1, 8)], held=[each] * (LAYERS + 2)
    )
    refused = "manual optimization" if type(subject.module).__name__ == "Manual" else ""
    model = ModelFigures(samples=8, chain=None if refused else chain, refused=refused)
    phases = {"data_wait": 2e-4, "forward": copies * 2e-3, "backward": 4e-3, "optimizer": 1e-4, "other": 2e-4}
    figures = RankFigures(rank=0, host="a", phases_s=phases, batches=2, model=model)
    memory = HeldMemory(
        rank=0, parameters_bytes=held, gradients_bytes=held, optimizer_bytes=2 * held, activations_bytes=3072
    )
    found = replace(
        report(figures), model=TrainedModel(class_="tests.Model", parameters=1296, trainable_parameters=1296),
        memory=[memory], profile=Profile(step_s=6.5e-3, ranks=[figures], findings=[]),
        world=ReportedWorld(size=1, nodes=1, hosts=["a"]),
    )  # fmt: skip
    return ShortRun(found, [("all_reduce", 1024)] * (num_ranks > 1))


@pytest.fixture(autouse=True)
def project(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (directory / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    (directory / "machine.json").write_text(json.dumps(MACHINE.as_json()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
    monkeypatch.setattr(measured_model, "short_run", run)
    threads = torch.get_num_threads()
    sizes.clear()
    yield directory
    torch.set_num_threads(threads)


def planned(*options: str) -> dict[str, Any]:
    assert main(["plan", "--config=run.yaml", "--json=plan.json", *options]) == 0
    document: dict[str, Any] = json.loads(Path("plan.json").read_text())
    return document


def test_every_strategy_is_predicted_or_has_a_reason(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = planned("--nodes", "1", "2")
    assert {path.name for path in project.iterdir()} == {"run.yaml", "machine.json", "plan.json"}
    predicted = {row["strategy"] for row in document["predictions"]}
    impossible = {row["strategy"] for row in document["impossible"]}
    assert predicted | impossible == NAMES
    assert {"ring_ddp", "ft_ddp", "gpipe", "cpu_ps"} <= predicted
    reasons = {(row["strategy"], *row["world"]): row["reason"] for row in document["impossible"]}
    looped = reasons["pipeline_interleaved", 2, 2]
    assert "8 stages for a chain of 4 layers" in looped
    assert "the step of hybrid is not known" in reasons["hybrid", 2, 2]
    printed = capsys.readouterr().out
    assert "Model: 1,296 parameters, 8 samples a batch and rank, accumulate_grad_batches=2; on one " in printed
    assert "First choice: " in printed
    assert "not cpu_ps: cpu_ps works on one host only" in printed


def test_layers_are_split_only_for_strategies_that_split_them() -> None:
    planned("--nodes", "2", "--strategies", "gpipe")
    assert sizes == [(1, 1), (1, 2)]
    planned("--nodes", "1", "--devices", "2", "4", "--strategies", "tensor_split")
    assert sizes[2:] == [(1, 1), (1, 2), (2, 1)], "4 ranks share 2 cores"


def test_ranks_of_one_machine_are_as_slow_as_copies_of_the_model_were(capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels, whatever the model, said 12 % where it was 5 %."""
    arguments = "--strategies", "ring_ddp", "--nodes", "1"
    document = planned(*arguments)
    assert document["predictions"][0]["parts_s"]["computation"] == pytest.approx(
        document["one_device"]["parts_s"]["computation"] * 8 / 6
    )
    small = replace(MACHINE, memory_bytes=10_000)
    Path("small.json").write_text(json.dumps(small.as_json()))
    main(["plan", "--config=run.yaml", "--machine=small.json", *arguments])
    assert "how much slower 2 ranks of one machine compute side by side was not measured" in capsys.readouterr().err
    assert sizes[2:] == [(1, 1)], "copies would not fit"


def test_an_old_profile_is_read_instead_of_a_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(SimpleNamespace(module=None)).document  # type: ignore[arg-type]
    Path("old.json").write_text(json.dumps(as_json(found)))
    document = planned("--profile=old.json", "--nodes", "1")
    assert sizes == [(1, 1)]
    assert {"ring_ddp", "gpipe"} <= {row["strategy"] for row in document["predictions"]}
    reasons = {row["strategy"]: row["reason"] for row in document["impossible"]}
    assert "leave --profile out" in reasons["tensor_split"]
    Path("old.json").write_text(json.dumps(as_json(replace(found, profile=None))))
    assert main(["plan", "--config=run.yaml", "--profile=old.json"]) == 2
    message = "old.json: this is no profile of one device for plans; train on one device with ProfilerReport(for_plan="
    assert message in capsys.readouterr().err


def test_the_numbers_of_a_row() -> None:
    [row] = planned("--strategies", "ring_ddp", "--nodes", "1")["predictions"]
    assert row["world"] == [1, 2]
    assert row["accumulate_grad_batches"] == 2
    assert row["step_s"] == pytest.approx(sum(row["parts_s"].values()))
    assert row["interval_s"][0] < row["step_s"] < row["interval_s"][1]
    assert row["samples_per_s"] == pytest.approx(2 * 2 * 8 / row["step_s"])
    # Adam keeps two tensors for each parameter.
    sizes = {"parameters_bytes": 5184, "gradients_bytes": 5184, "optimizer_bytes": 2 * 5184}
    assert {name: row["memory"][name] for name in sizes} == sizes
    assert row["sent_bytes"] == {"host": 5184.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--micro-batches=2"], "unrecognized arguments: --micro-batches=2"),
        (["--json", "no/such.json"], "--json=no/such.json: there is no directory no; make it first"),
        (["--machine=other.json"], "other.json: there is no such file; run 'lightning-multigpu calibrate'"),
        (["--machine=run.yaml"], "run.yaml is no machine.json"),
        (["--machine=gpus.json"], "gpus.json is of cuda devices, and the configuration trains on cpu"),
        (["--strategies", "ring_dpp"], "Did you mean 'ring_ddp'?"),
        (["--strategies", "ring_ddp:bucket=1"], "RingDDPStrategy has no option 'bucket'"),
        (["--model=tests.commands.test_plan.Failing"], "ZeroDivisionError: division by zero"),
        # A traceback of 15 lines.
        (
            ["--machine=alone.json", "--nodes=2", "--strategies", "ring_ddp"],
            "nothing can be predicted: 2 x 2 needs the link between hosts, which this machine does not have; "
            "calibrate on two hosts or more, or pass --link-gbit\n",
        ),
        (["--nodes=1", "--devices=4"], "4 ranks would share 2 cores"),
    ],
)
def test_what_is_wrong_is_refused_in_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, change in (("gpus", {"device_type": "cuda"}), ("alone", {"between": None})):
        changed: Any = change
        Path(f"{name}.json").write_text(json.dumps(replace(MACHINE, **changed).as_json()))
    assert main(["plan", "--config=run.yaml", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_names_are_whole_in_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    planned("--nodes", "1", "2", "--strategies", "pipeline_interleaved:num_micro_batches=4", "ring_ddp:bucket_cap_mb=2")
    table = capsys.readouterr().out.partition("ms a step")[2].partition("parameters")[0].splitlines()[1:-1]
    names = [line[:21].rstrip() for line in table]
    assert {"pipeline_interleaved", " num_micro_batches=4", "ring_ddp", " bucket_cap_mb=2"} <= {*names}


def test_what_others_disturbed_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    machine = replace(MACHINE, disturbed={"1 x 2": 0.41, "2 x 2": 0.3}, versions={"torch": "1.0"})
    Path("machine.json").write_text(json.dumps(machine.as_json()))
    planned("--strategies", "ring_ddp", "--nodes", "1")
    printed = capsys.readouterr()
    assert printed.out.splitlines()[:2] == [
        "warning: other processes took 41 % of the processors during the calibration of 1 x 2",
        "Times below may be wrong: repeat this on a quiet machine.",
    ]
    assert f"torch was 1.0 at the calibration, and is {torch.__version__}" in printed.err


def test_a_module_that_is_no_chain_has_other_strategies(capsys: pytest.CaptureFixture[str]) -> None:
    document = planned("--model=tests.commands.planned.Manual", "--strategies", "ring_ddp", "gpipe", "--nodes", "1")
    assert [row["strategy"] for row in document["predictions"]] == ["ring_ddp"]
    [refused] = document["impossible"]
    assert "manual" in refused["reason"]


class Failing(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 1 / 0
