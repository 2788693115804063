"""``lightning-multigpu compare``: runs under several strategies, and what becomes of one that fails."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from lightning_multigpu.cli import main
from lightning_multigpu.commands import compare
from tests import preforked

CONFIG = Path(__file__).parents[2] / "configs/single_device.yaml"


@pytest.mark.launch
def test_a_row_for_each_strategy_that_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CONFIG.parents[1])

    def run(command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        return preforked.run(command, timeout=400)

    monkeypatch.setattr(compare.subprocess, "run", run)
    strategies, few = "single_device,no_such_strategy", ("--trainer.max_epochs=1", "--trainer.limit_val_batches=0")
    arguments = [f"--config={CONFIG}", f"--strategies={strategies}", f"--folder={tmp_path}", *few]
    assert main(["compare", *arguments]) == 1
    printed = capsys.readouterr()
    assert re.search(r"^single_device .*\d", printed.out, re.MULTILINE)
    assert "no_such_strategy has no profile: fit ended with status 2" in printed.err
