"""``lightning-multigpu strategies``: the table; and strategies as the value of an option of several commands."""

import re

import pytest

from lightning_multigpu.cli import main
from lightning_multigpu.commands.option_parser import strategies_of
from lightning_multigpu.commands.strategies import SYMBOLS, as_table
from lightning_multigpu.commands.usage import UsageError
from lightning_multigpu.registry import STRATEGIES


def test_table_has_every_cell_in_full(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["strategies"]) == 0
    table = capsys.readouterr().out
    assert "\x1b" not in table, "colours are for terminals"
    words = table.replace("│", " ").split()
    for row in STRATEGIES:
        for text in (row.name, row.summary, row.compute, row.gradients, row.model):
            assert " ".join(text.split()) in " ".join(words)
        assert row.bytes_per_step in " ".join(words)


def test_table_explains_the_letters_of_its_formulas_and_no_others() -> None:
    words = re.findall("[A-Za-z]+", " ".join(f"{row.summary} {row.compute} {row.bytes_per_step}" for row in STRATEGIES))
    used = {letter for word in words if {*word} <= SYMBOLS.keys() for letter in word}
    assert all(f"{letter}: " in str(as_table(STRATEGIES).caption) for letter in SYMBOLS)
    assert used == SYMBOLS.keys()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["ddp", "ring_ddp"], ["ddp", "ring_ddp"]),
        (["ddp, ring_ddp"], ["ddp", "ring_ddp"]),
        (["ring_ddp:a=int8,b=no,cpu_ps"], ["ring_ddp:a=int8,b=no", "cpu_ps"]),
        (["hybrid:plan={a: 1, b: [2, 3]},ddp"], ["hybrid:plan={a: 1, b: [2, 3]}", "ddp"]),
    ],
)  # fmt: skip
def test_strategies_with_spaces_or_commas_between(given: list[str], found: list[str]) -> None:
    assert strategies_of(given) == found


@pytest.mark.parametrize("given", [[","], ["ddp", "ddp"]])
def test_no_strategy_or_one_twice(given: list[str]) -> None:
    with pytest.raises(UsageError, match="name each strategy once"):
        strategies_of(given)
