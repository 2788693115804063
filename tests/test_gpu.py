"""Checks on GPUs are those of ``python -m benchmarks.gpu``: ``pytest -m gpu`` runs them where there is a GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import sharing
from benchmarks.gpu.card import Card
from benchmarks.gpu.table import Check, NotPossibleError, Place

CPU = Card("cpu", 1, "gloo")


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    card, _ = sharing.tried(Card.found("cuda"))
    made = Place(card)
    yield made
    made.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("check", program.all_checks(), ids=lambda check: check.name)
def test_on_a_gpu(check: Check, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in place.card.variables.items():
        monkeypatch.setenv(name, value)
    try:
        with place.of(check):
            check.function(place)
    except NotPossibleError as error:
        pytest.skip(str(error))


def test_the_program_on_cpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line of the program runs on CPUs too; this is one row of two checks, and its file."""
    for name, value in CPU.variables.items():
        monkeypatch.setenv(name, value)
    chosen = (("ddp_sharded", "as one process"), ("machine", "launch-bound is found"))
    checks = [check for check in program.all_checks() if (check.row, check.column) in chosen]
    monkeypatch.setattr(program, "all_checks", lambda: checks)
    assert program.main(["--device", "cpu", "--no-figures", "--results", str(tmp_path / "gpu.txt")]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "gpu.txt").read_text() == printed
    assert "1 held, 0 failed, 1 not possible, 0 not run" in printed
    assert program.main(["--device", "cpu", "--only", "nothing"]) == 2
    assert "the rows are ddp_sharded" in capsys.readouterr().err


def test_every_strategy_has_a_row() -> None:
    from lightning_multigpu.registry import STRATEGIES

    assert {row.name for row in STRATEGIES} <= {check.row for check in program.all_checks()}
    names = [check.name for check in program.all_checks()]
    assert len(names) == len(set(names))
