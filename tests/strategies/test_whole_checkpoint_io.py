"""A save that does not come to its end leaves what was there before, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_multigpu import RingDDPStrategy
from lightning_multigpu.strategies import whole_checkpoint_io
from lightning_multigpu.strategies.whole_checkpoint_io import WholeCheckpointIO

# The kernel ends a process that writes beyond its limit, in the middle of the write.
KILLED = """
import resource, signal, sys, torch
from lightning_multigpu.strategies.whole_checkpoint_io import WholeCheckpointIO
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
    finished = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert finished.returncode not in (0, None)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert os.listdir(place) == ["last.ckpt"]
    assert not [name for name in os.listdir(temporary) if not name.startswith("torchinductor")]


@pytest.mark.parametrize("unnamed", [True, False])
def test_replaces_and_reads_what_it_writes(unnamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not unnamed:
        monkeypatch.setattr(whole_checkpoint_io, "_write_unnamed", lambda *arguments: False)
    checkpoints, path = WholeCheckpointIO(), tmp_path / "deep" / "last.ckpt"
    for step in (1, 2):
        checkpoints.save_checkpoint({"step": step}, path)
    assert checkpoints.load_checkpoint(path) == {"step": 2}
    assert os.listdir(path.parent) == ["last.ckpt"]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_what_cannot_be_saved_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_checkpoint_io, "_write_unnamed", lambda *arguments: False)
    with pytest.raises(Exception, match="pickle"):
        WholeCheckpointIO().save_checkpoint({"function": lambda: None}, tmp_path / "last.ckpt")
    assert os.listdir(tmp_path) == []


class _Wrapping:
    """As Lightning's wrappers are: they get the one that does the work."""

    checkpoint_io: Any = TorchCheckpointIO()


def test_strategies_use_it_unless_the_user_passes_another() -> None:
    assert isinstance(RingDDPStrategy().checkpoint_io, WholeCheckpointIO)
    own = TorchCheckpointIO()
    assert RingDDPStrategy(checkpoint_io=own).checkpoint_io is own
    wrapping: Any = _Wrapping()
    found: Any = RingDDPStrategy(checkpoint_io=wrapping).checkpoint_io
    assert isinstance(found.checkpoint_io, WholeCheckpointIO)
