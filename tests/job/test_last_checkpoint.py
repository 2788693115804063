"""A run that was stopped goes on from its newest complete checkpoint, whatever lies beside it."""

import os
import threading
import warnings
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_multigpu.job.checkpoint_files import last_checkpoint
from lightning_multigpu.job.checkpoint_files.last_checkpoint import find_last_checkpoint, last_checkpoint_of
from tests.strategies.tasks import Case, Classifier, make_trainer, train_loader


def saved(path: Path, *, step: int, epoch: int = 0, written_s: float = 1e9, **others: Any) -> str:
    """A checkpoint in Lightning's order, written ``written_s`` after 1970."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {"hyper_parameters": {"global_step": 10**6}, "optimizer_states": [], **others}
    torch.save({"epoch": epoch, "global_step": step, "state_dict": {"w": torch.ones(3)}, **kept}, path)
    os.utime(path, (written_s, written_s))
    return str(path)


def test_what_a_file_holds_counts_and_not_its_name(tmp_path: Path) -> None:
    """``last.ckpt`` followed the best epoch, and was five epochs older than the file beside it."""
    saved(tmp_path / "last.ckpt", step=10, epoch=1, written_s=3e9)
    newest = saved(tmp_path / "epoch=6.ckpt", step=60, epoch=6, written_s=2e9)
    saved(tmp_path / "zz.ckpt", step=60, epoch=5, written_s=4e9)
    assert find_last_checkpoint(tmp_path) == newest


def test_the_run_that_was_trained_last_counts(tmp_path: Path) -> None:
    """A long run of last week had the higher step, and a new one in the next version was resumed from it."""
    saved(tmp_path / "version_0" / "checkpoints" / "long.ckpt", step=900, written_s=1e9)
    saved(tmp_path / "version_1" / "checkpoints" / "a.ckpt", step=20, written_s=3e9)
    newest = saved(tmp_path / "version_1" / "checkpoints" / "b.ckpt", step=40, written_s=2e9)
    assert find_last_checkpoint(tmp_path) == newest


def test_a_truncated_file_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    older = saved(tmp_path / "epoch=0.ckpt", step=10)
    broken = saved(tmp_path / "epoch=1.ckpt", step=20)
    os.truncate(broken, os.path.getsize(broken) - 60)
    with pytest.warns(UserWarning, match=r"epoch=1\.ckpt is skipped: it is damaged, or no checkpoint \("):
        assert find_last_checkpoint(tmp_path) == older


@pytest.mark.filterwarnings("ignore:.* is skipped. it is damaged, or no checkpoint")
def test_a_file_with_a_changed_byte_does_not_hide_the_good_one(tmp_path: Path) -> None:
    """Some bytes of the archive's directory made zipfile raise NotImplementedError or RuntimeError, which stayed."""
    older = saved(tmp_path / "epoch=0.ckpt", step=10)
    broken = Path(saved(tmp_path / "epoch=1.ckpt", step=20))
    whole = broken.read_bytes()
    start = whole.index(b"PK\x01\x02", whole.index(b"/data.pkl"))
    for place in range(start, start + 46):
        broken.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        assert find_last_checkpoint(tmp_path) in (older, str(broken))


def test_temporary_files_weights_alone_broken_links_and_pipes_are_left_out(tmp_path: Path) -> None:
    newest = saved(tmp_path / "last.ckpt", step=10)
    saved(tmp_path / ".last.ckpt.4242", step=30)
    saved(tmp_path / ".next.ckpt", step=30)
    weights = {"epoch": 3, "global_step": 40, "state_dict": {}}
    torch.save(weights, tmp_path / "weights.ckpt")
    (tmp_path / "link.ckpt").symlink_to("gone.ckpt")
    os.mkfifo(tmp_path / "pipe.ckpt")  # its reader waited for ever for a writer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_last_checkpoint(tmp_path) == newest


def test_finding_nothing_is_an_error_unless_asked_for_otherwise(tmp_path: Path) -> None:
    """A misspelt directory would train from the beginning, and nobody would notice for hours."""
    for directory in (tmp_path, tmp_path / "rusn"):
        with pytest.raises(FileNotFoundError, match=f"no complete checkpoint in '{directory}' or below it; pass the"):
            find_last_checkpoint(directory)
        assert find_last_checkpoint(directory, missing_ok=True) is None


def test_no_code_of_a_file_is_run(tmp_path: Path) -> None:
    class Planted:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    path = saved(tmp_path / "last.ckpt", step=1, planted=Planted())
    assert find_last_checkpoint(tmp_path) == path
    assert not (tmp_path / "ran").exists()


def test_a_url(tmp_path: Path) -> None:
    local = saved(tmp_path / "last.ckpt", step=5)
    system = fsspec.filesystem("memory")
    system.pipe("/bucket/run/last.ckpt", Path(local).read_bytes())
    try:
        assert find_last_checkpoint("memory://bucket/run") == "memory:///bucket/run/last.ckpt"
    finally:
        system.rm("/bucket", recursive=True)


def test_a_failed_run_does_not_wait_for_a_folder_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search came before the message of the failure, which was never shown, and the job stayed."""
    over = threading.Event()
    monkeypatch.setattr(last_checkpoint, "complete_checkpoints", lambda folder: over.wait(60) and [])
    monkeypatch.setattr(last_checkpoint, "_LOOK_S", 0.1)
    trainer = make_trainer(Case(), "auto", 1, callbacks=[ModelCheckpoint(tmp_path)], enable_checkpointing=True)
    assert last_checkpoint_of(trainer) is None
    assert not over.is_set()
    over.set()


def test_a_trainers_own(tmp_path: Path) -> None:
    """The file that a failure names: not one that an earlier program left in the same directory."""
    saved(tmp_path / "older.ckpt", step=500)
    trainer = make_trainer(
        Case(), "auto", 1, callbacks=[ModelCheckpoint(tmp_path)], enable_checkpointing=True, max_epochs=1
    )
    assert last_checkpoint_of(trainer) is None
    trainer.fit(Classifier(), train_loader(Case(), 1))
    assert last_checkpoint_of(trainer) == str(tmp_path / "epoch=0-step=7.ckpt")
    resumed = make_trainer(Case(), "auto", 1, max_epochs=1)
    resumed.fit(Classifier(), train_loader(Case(), 1), ckpt_path=tmp_path / "epoch=0-step=7.ckpt")
    assert last_checkpoint_of(resumed) == str(tmp_path / "epoch=0-step=7.ckpt")
