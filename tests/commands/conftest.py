"""The process and the directory in which commands run as a user's."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory; what commands set in this process is taken away again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["lightning-multigpu"])
    names = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "PYTORCH_NVML_BASED_CUDA_CHECK", "LOCAL_RANK", "NODE_RANK")
    for name in (*names, "SLURM_LOCALID"):
        monkeypatch.setenv(name, "")  # so that it is taken away again when a run sets it
        monkeypatch.delenv(name)
    return tmp_path
