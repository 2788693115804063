"""``lightning-multigpu new``: a directory that trains at once; test_packaging trains it from the installed wheel."""

import os
from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_multigpu.cli import main
from lightning_multigpu.commands import new
from lightning_multigpu.new_project.data import TextData
from lightning_multigpu.new_project.model import NextByte


def refusal(capsys: pytest.CaptureFixture[str], directory: Path) -> str:
    """What standard error says of the directory that cannot be taken, with DIR in its place."""
    assert main(["new", str(directory)]) == 2
    return capsys.readouterr().err.removeprefix("lightning-multigpu new: error: ").replace(str(directory), "DIR")


def test_files_of_a_user_stay_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody who has written a model.py already and calls it in that directory must not lose the file."""
    (tmp_path / "model.py").write_text("mine")
    assert refusal(capsys, tmp_path) == "DIR is not empty (model.py); pass a new directory, or an empty one\n"
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
    assert refusal(capsys, tmp_path / "model.py") == "DIR: File exists; pass a directory that can be written\n"


@pytest.mark.parametrize(("name", "shown"), [("my projects/first", "'my projects/first'"), (".", ".")])
def test_a_directory_is_made_or_taken_if_it_is_empty(
    name: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", name]) == 0
    assert sorted(os.listdir(name)) == sorted(new.FILES)
    assert f"cd {shown} && lightning-multigpu fit --config config.yaml" in capsys.readouterr().out


def test_module_and_data_have_what_all_four_commands_need() -> None:
    """The project had neither test_step nor predict_step."""
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", devices=1, fast_dev_run=True, **options)
    module, data = NextByte(), TextData(batch_size=4)
    trainer.fit(module, data)
    (validated,) = trainer.validate(module, data)
    (tested,) = trainer.test(module, data)
    assert validated["val_loss"] != tested["test_loss"], "of different samples"
    assert [batch.shape for batch in trainer.predict(module, data) or ()] == [torch.Size([4])]
