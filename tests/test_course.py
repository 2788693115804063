"""The pages "Exercises for a course" and "Port your project in ten minutes", as a reader runs them."""

import itertools
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from lightning_multigpu.commands import new
from tests import documents
from tests.commands.planned import MACHINE
from tests.documents import ROOT

PROGRAMS = {
    "lightning-multigpu": ["-m", "lightning_multigpu"],
    "python": [],
    "torchrun": ["-m", "torch.distributed.run"],
}
PLAN_SOON = """import sys
from datetime import timedelta
from lightning_multigpu.cli import main
from lightning_multigpu.commands.plans import measured_model
measured_model._ACTIVE = measured_model._BARE = timedelta(seconds=0.01)
sys.exit(main(sys.argv[1:]))"""  # it measured for seconds; no time in it is looked at here
COMMANDS = [shlex.split(line) for block in documents.blocks(ROOT / "docs/course.md") for line in block.splitlines()]
RING, PLAN, FIT, SYNC, ASYNC, *_ = COMMANDS


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def run(directory: Path, command: list[str], *few: str) -> str:
    programs = PROGRAMS | ({"lightning-multigpu": ["-c", PLAN_SOON]} if command[1] == "plan" else {})
    python, *parts = itertools.chain(*([sys.executable, *programs[w]] if w in programs else [w] for w in command))
    assert python == sys.executable
    return documents.run(directory, *parts, *few, OMP_NUM_THREADS="1")


@pytest.mark.launch
def test_a_ring_by_hand_sends_what_the_formula_says(checkout: Path) -> None:
    output = run(checkout, RING, "--megabytes=0.4")
    assert "sent by rank 0: 0.600 MB; 2(n-1)/n S = 0.600 MB" in output
    [difference] = re.findall(r"^largest difference .*: (.+)$", output, re.MULTILINE)
    assert float(difference) < 1e-5


@pytest.mark.launch
def test_the_bubble_of_a_pipeline_is_planned_and_measured(checkout: Path) -> None:
    small = ("--model.width=32", "--model.context=16", "--data.context=16", "--data.batch_size=8")
    (checkout / "machine.json").write_text(json.dumps(MACHINE.as_json()))
    run(checkout, PLAN, *small, "--nodes=1", "--json=plan.json")
    rows = json.loads((checkout / "plan.json").read_text())["predictions"]
    assert {row["options"].get("num_micro_batches") for row in rows} == {1, None}
    assert re.search(r"do not work for .* %; in theory 20.0 %", run(checkout, FIT, *small, "--trainer.max_steps=9"))


@pytest.mark.launch
@pytest.mark.parametrize(("command", "updates"), [(SYNC, 20), (ASYNC, 40)], ids=["sync_ps", "async_ps"])
def test_each_batch_is_trained_on_beside_a_slow_rank(checkout: Path, command: list[str], updates: int) -> None:
    output = run(checkout, command, "--max-epochs=1", "--fast-ms=1", "--slow-ms=10")
    batches = {int(rank): int(number) for rank, number in re.findall(r"rank (\d) trained on (\d+) batches", output)}
    assert sum(batches.values()) == 40, "1,257 images in batches of 32"
    assert updates == 40 or batches[0] == batches[1]
    assert f"{updates} optimizer steps" in output


PAGE = ROOT / "docs/port.md"
FEW = {"OMP_NUM_THREADS": "1", "PL_TRAINER_LIMIT_TRAIN_BATCHES": "0.1"}  # a tenth of the training data


@pytest.mark.launch
def test_every_step_of_the_page_runs(tmp_path: Path) -> None:
    new.write(tmp_path)
    (tmp_path / "machine.json").write_text(json.dumps(MACHINE.as_json()))
    results = []
    for number, script in enumerate(documents.blocks(PAGE, "python")):
        (tmp_path / f"step_{number}.py").write_text(script)
        output = documents.run(tmp_path, f"step_{number}.py", **FEW)
        [(steps, loss)] = re.findall(r"^(\d+) steps, val_loss (.+)$", output, re.MULTILINE)
        results.append((int(steps), float(loss)))
    one_device, ring, pipeline = results
    assert ring[0] == one_device[0] > 10, "the same global batch"
    assert ring[1] == pytest.approx(one_device[1], rel=0.05)
    assert pipeline[0] == 2 * ring[0], "it goes on where ring_ddp has ended"
    assert pipeline[1] < ring[1]
    for command in "".join(documents.blocks(PAGE)).splitlines():
        run(tmp_path, shlex.split(command), "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=2")
    reports = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("runs/*/multigpu_report.json"))]
    assert [report["steps"] for report in reports] == [2, 2], "an epoch, and one more after the run was resumed"
    assert {report["global_batch"] for report in reports} == {240}
