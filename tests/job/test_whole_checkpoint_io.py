"""A save that does not come to its end leaves what was there before, and nothing else."""

import errno
import gc
import os
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_multigpu import RingDDPStrategy
from lightning_multigpu.job.checkpoint_files.whole_checkpoint_io import WholeCheckpointIO, map_files
from tests import preforked
from tests.strategies.tasks import Case, Classifier, assert_same_weights, fit_module, state, trained_weights
from tests.world import World

# The kernel ends a process that writes beyond its limit, in the middle of the write.
KILLED = """
import resource, signal, sys, torch
from lightning_multigpu.job.checkpoint_files.whole_checkpoint_io import WholeCheckpointIO
signal.signal(signal.SIGXFSZ, {handler})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
WholeCheckpointIO().save_checkpoint({{"weights": torch.zeros(1_000_000)}}, sys.argv[1])
"""


@pytest.mark.parametrize("handler", ["signal.SIG_DFL", "signal.SIG_IGN"], ids=["killed", "disk full"])
def test_a_save_that_breaks_off_leaves_the_former_file(handler: str, tmp_path: Path) -> None:
    place, temporary = tmp_path / "saved", tmp_path / "temporary"
    temporary.mkdir()
    path = place / "last.ckpt"
    WholeCheckpointIO().save_checkpoint({"step": 1}, path)
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", KILLED.format(handler=handler), str(path)]
    finished = preforked.run(command, env=environment, timeout=300)
    assert finished.returncode not in (0, None)
    if handler == "signal.SIG_IGN":
        last = finished.stderr.strip().splitlines()[-1]
        assert re.fullmatch(
            r"OSError: \[Errno 27\] the checkpoint was not saved: File too large \(\d+\.\d MB are free there\); "
            rf"a previous file of that name is unchanged: '{re.escape(str(path))}'",
            last,
        ), "torch tells neither the path nor the reason of some"
    assert torch.load(path, weights_only=True) == {"step": 1}
    if handler == "signal.SIG_IGN":
        assert os.listdir(place) == ["last.ckpt"]
    assert not [name for name in os.listdir(temporary) if not name.startswith("torchinductor")]


def test_replaces_and_reads_what_it_writes(tmp_path: Path) -> None:
    checkpoints, path = WholeCheckpointIO(), tmp_path / "deep" / "last.ckpt"
    for step in (1, 2):
        checkpoints.save_checkpoint({"step": step}, path)
    with pytest.raises(Exception, match="pickle"):
        checkpoints.save_checkpoint({"function": lambda: None}, path)
    assert checkpoints.load_checkpoint(path) == {"step": 2}
    assert os.listdir(path.parent) == ["last.ckpt"]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_the_new_name_is_on_the_disk_before_an_older_file_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut the new name could be missing, and the older checkpoint was removed already."""
    done: list[tuple[str, Any]] = []
    real_replace, real_fsync = os.replace, os.fsync

    def replace(source: Any, target: Any) -> None:
        real_replace(source, target)
        done.append(("replaced", os.path.basename(target)))

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        done.append(("synced", os.path.isdir(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "fsync", fsync)
    WholeCheckpointIO().save_checkpoint({"step": 1}, tmp_path / "last.ckpt")
    assert done == [("synced", False), ("replaced", "last.ckpt"), ("synced", True)]


def test_a_directory_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new file had its name already when the message said that the former one was unchanged."""
    real_open, path = os.open, tmp_path / "last.ckpt"

    def refusing(name: Any, *args: Any, **kwargs: Any) -> int:
        if name == str(tmp_path):
            raise OSError(errno.EMFILE, "Too many open files")
        return real_open(name, *args, **kwargs)

    WholeCheckpointIO().save_checkpoint({"step": 1}, path)
    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(OSError, match=r"not saved: .* a previous file of that name is unchanged"):
        WholeCheckpointIO().save_checkpoint({"step": 2}, path)
    assert WholeCheckpointIO().load_checkpoint(path) == {"step": 1}


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_later_save_removes_what_a_killed_one_has_left(is_killed: bool, tmp_path: Path) -> None:
    """Each killed save left its part for ever."""
    left = tmp_path / ".epoch=3.ckpt.77.partial"
    left.write_bytes(b"half")
    if is_killed:
        os.utime(left, (0, 0))
    (tmp_path / ".settings").write_text("the user's")
    WholeCheckpointIO().save_checkpoint({"step": 1}, tmp_path / "last.ckpt")
    assert left.exists() != is_killed
    assert (tmp_path / ".settings").exists()


@pytest.mark.parametrize("kind", [WholeCheckpointIO, TorchCheckpointIO])
def test_what_is_mapped_can_be_used_while_the_file_changes(kind: type[TorchCheckpointIO], tmp_path: Path) -> None:
    """A user's own plugin stays as it is, and maps nothing."""
    checkpoints, path = kind(), tmp_path / "last.ckpt"
    checkpoints.save_checkpoint({"weights": torch.arange(1000.0)}, path)
    map_files(checkpoints)
    loaded = checkpoints.load_checkpoint(path)["weights"]
    assert is_mapped(path) == (kind is WholeCheckpointIO)
    loaded[0] = 7.0
    assert checkpoints.load_checkpoint(path)["weights"][0] == 0, "the file is not written"
    checkpoints.save_checkpoint({"weights": torch.zeros(5)}, path)
    checkpoints.remove_checkpoint(path)
    assert torch.equal(loaded[1:], torch.arange(1.0, 1000))


def test_what_cannot_be_mapped_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, path = WholeCheckpointIO(), tmp_path / "former.ckpt"
    map_files(checkpoints)
    torch.save({"weights": torch.ones(9)}, path, _use_new_zipfile_serialization=False)
    assert torch.equal(checkpoints.load_checkpoint(path)["weights"], torch.ones(9))
    path.write_bytes(b"no checkpoint")
    with pytest.raises(Exception, match=r"Weights only load failed|invalid load key|not a zip"):
        checkpoints.load_checkpoint(path)
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        checkpoints.load_checkpoint(tmp_path / "none.ckpt")


class Resuming(Classifier):
    """Notes whether its checkpoint is mapped when it has been loaded, and when training begins."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.mapped: list[bool] = []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.mapped.append(is_mapped(self.path))

    def on_train_start(self) -> None:
        gc.collect()
        self.mapped.append(is_mapped(self.path))


def resume(path: Path) -> tuple[list[bool], dict[str, Any]]:
    fit_module(Classifier("adamw"), "gpipe", 2, Case(max_epochs=1)).save_checkpoint(path)
    module = Resuming()
    module.path = path
    fit_module(module, "gpipe", 2, Case(max_epochs=2), ckpt_path=path)
    return module.mapped, {"weights": state(module)}


def test_a_pipeline_maps_the_checkpoint_and_keeps_nothing_of_the_file(tmp_path: Path, world2: World) -> None:
    reference = trained_weights(partial(Classifier, "adamw"), None, 1, Case(max_epochs=2))
    for mapped, result in world2.run(resume, tmp_path / "half.ckpt"):
        assert mapped == [True, False]
        assert_same_weights(result, reference)


def test_strategies_use_it_unless_the_user_passes_another() -> None:
    assert isinstance(RingDDPStrategy().checkpoint_io, WholeCheckpointIO)
    own = TorchCheckpointIO()
    assert RingDDPStrategy(checkpoint_io=own).checkpoint_io is own
    wrapping: Any = SimpleNamespace(checkpoint_io=TorchCheckpointIO())  # as Lightning's wrappers
    found: Any = RingDDPStrategy(checkpoint_io=wrapping).checkpoint_io
    assert isinstance(found.checkpoint_io, WholeCheckpointIO)
