"""Completion of the command line, asked for as bash asks for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lightning_multigpu.cli import COMMANDS, main
from lightning_multigpu.registry import STRATEGIES

NAMES = [row.name for row in STRATEGIES]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "script"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["--print_completion", "bash"]) == 0
    return path


def completed(script: Path, *words: str) -> list[str]:
    """The words that are offered for the last one; bash takes "=" for a word of its own."""
    line = ["lightning-multigpu", *words]
    ask = (
        'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _lightning_multigpu; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    ended = subprocess.run(["bash", "-c", ask, str(script), *line], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    return ended.stdout.split()


def test_commands(script: Path) -> None:
    assert completed(script, "") == [
        *dict.fromkeys(command.name.split()[0] for command in COMMANDS),
        "--help",
        "--version",
    ]
    assert completed(script, "be") == ["bench"]
    assert completed(script, "bench", "c") == ["collectives"]


def test_settings_and_options(script: Path) -> None:
    assert completed(script, "fit", "--trainer.max_e") == ["--trainer.max_epochs"]
    assert "--model" in completed(script, "validate", "-c", "run.yaml", "--")
    assert completed(script, "emulate", "--no") == ["--nodes"]
    assert completed(script, "strategies", "--j") == ["--json"]
    assert completed(script, "bench", "collectives", "--step") == ["--step-factor"]
    assert completed(script, "plan", "--link") == ["--link-gbit"]


@pytest.mark.parametrize(
    ("words", "prefix"),
    [
        (["--trainer.strategy", ""], ""),
        (["--trainer.strategy", "="], ""),
        (["--trainer.strategy", "=", ""], ""),
        (["--trainer.strategy="], "--trainer.strategy="),  # as zsh has it
    ],
)
def test_names_of_strategies(words: list[str], prefix: str, script: Path) -> None:
    assert completed(script, "fit", *words) == [prefix + name for name in NAMES]


def test_files_are_left_to_the_shell(script: Path) -> None:
    assert completed(script, "fit", "--config", "ru") == []
    assert "complete -o default " in script.read_text()


@pytest.mark.parametrize("words", [["--print_completion"], ["--print_completion=fish"]])
def test_another_shell(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "pass bash or zsh" in capsys.readouterr().err
