"""``lightning-multigpu strategies``: the table that people read and the JSON that programs read."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pydoc import locate

import pytest

from lightning_multigpu.cli import main
from lightning_multigpu.commands.strategies import SYMBOLS, as_table
from lightning_multigpu.registry import STRATEGIES


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["strategies", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_table_has_every_cell_in_full(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table = printed(capsys)
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


def test_json_has_the_documented_keys_and_one_entry_a_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(printed(capsys, "--json"))
    assert list(listed) == ["schema_version", "symbols", "strategies"]
    assert listed["schema_version"] == 1
    assert [entry["name"] for entry in listed["strategies"]] == [row.name for row in STRATEGIES]
    keys = ["class" if field.name == "class_path" else field.name for field in fields(STRATEGIES[0])]
    assert all(list(entry) == keys for entry in listed["strategies"])


def test_json_class_can_be_imported_and_made_with_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    for entry, row in zip(json.loads(printed(capsys, "--json"))["strategies"], STRATEGIES, strict=True):
        assert locate(entry["class"]) is row.strategy
        row.strategy(**entry["options"])
