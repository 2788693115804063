"""``lightning-multigpu compare``: runs under several strategies, and what becomes of one that fails."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config=nowhere.yaml", "--strategies=auto"], "--config=nowhere.yaml: there is no such file"),
        ([f"--config={CONFIG}", "--strategies", "auto,auto"], "--strategies=auto,auto: name each strategy once"),
        ([f"--config={CONFIG}"], "required: --strategies"),
        (
            [f"--config={CONFIG}", "--strategies=auto,ring_dpp"],
            "'ring_dpp': there is no such strategy. Did you mean 'ring_ddp'?",
        ),
        ([f"--config={CONFIG}", "--strategies=auto", "--trainer.max_epoch=1"], "max_epoch"),
    ],
)
def test_what_cannot_be_compared(arguments: list[str], words: str, capsys: pytest.CaptureFixture[Any]) -> None:
    assert main(["compare", *arguments]) == 2
    assert words in capsys.readouterr().err
