"""The page "Port your project in ten minutes": its scripts and commands, one after the other, as a reader runs them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from lightning_multigpu.commands import new
from tests import documents
from tests.commands.planned import MACHINE
from tests.documents import ROOT, run

PAGE = ROOT / "docs/port.md"
FEW = {"OMP_NUM_THREADS": "1", "PL_TRAINER_LIMIT_TRAIN_BATCHES": "0.1"}  # a tenth of the training data


@pytest.mark.launch
def test_every_step_of_the_page_runs(tmp_path: Path) -> None:
    new.write(tmp_path)
    (tmp_path / "machine.json").write_text(json.dumps(MACHINE.as_json()))
    results = []
    for number, script in enumerate(documents.blocks(PAGE, "python")):
        (tmp_path / f"step_{number}.py").write_text(script)
        output = run(tmp_path, f"step_{number}.py", **FEW)
        [(steps, loss)] = re.findall(r"^(\d+) steps, val_loss (.+)$", output, re.MULTILINE)
        results.append((int(steps), float(loss)))
    one_device, ring, pipeline = results
    assert ring[0] == one_device[0] > 10, "the same global batch"
    assert ring[1] == pytest.approx(one_device[1], rel=0.05)
    assert pipeline[0] == 2 * ring[0], "it goes on where ring_ddp has ended"
    assert pipeline[1] < ring[1]
    for command in "".join(documents.blocks(PAGE)).splitlines():
        program, subcommand, *arguments = shlex.split(command)
        assert program == "lightning-multigpu"
        few = ["--trainer.limit_train_batches=2", "--trainer.limit_val_batches=2"]
        run(tmp_path, "-m", "lightning_multigpu", subcommand, *arguments, *few, **FEW)
    reports = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("runs/*/multigpu_report.json"))]
    assert [report["steps"] for report in reports] == [2, 2], "an epoch, and one more after the run was resumed"
    assert {report["global_batch"] for report in reports} == {240}
