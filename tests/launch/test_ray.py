"""Ray Train starts the ranks: the strategy takes them, or says what to set. The Ray is a real one, with two workers."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from tests.launch import job
from tests.launch.ray_script import CASE
from tests.strategies.tasks import assert_same_weights, fit

SCRIPT = Path(__file__).with_name("ray_script.py")


@pytest.mark.launch
def test_workers_of_ray_train(tmp_path: Path) -> None:
    """With ``devices="auto"``, one on CPUs, the guardian refused a rank of two, and the other had an IndexError.

    ft_ddp wanted to make the store and the group that Ray has made. Ray starts all ranks again when one is lost.
    """
    if importlib.util.find_spec("ray") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no Ray: pip install 'ray[train]'")
    finished = job.run(str(tmp_path), str(SCRIPT), str(tmp_path), timeout_s=200, RAY_USAGE_STATS_ENABLED="0")
    assert finished.returncode == 0, (finished.stdout + finished.stderr)[-8000:]
    one, others = fit(CASE, None, 1), []
    assert (tmp_path / "lost").exists()
    assert "Restored all states from the checkpoint" in finished.stdout + finished.stderr
    for rank in range(2):
        for name in "ring_ddp", "ft_ddp":
            assert (tmp_path / f"{name}-error-{rank}").read_text() == (
                "devices=1 and num_nodes=1 make 1 ranks, and RayLightningEnvironment has 2 "
                f"(this one has local rank {rank}): set Trainer(devices=2, num_nodes=1)"
            )
        assert_same_weights({"weights": torch.load(tmp_path / f"ring_ddp-{rank}.pt")}, one)
        others.append({"weights": torch.load(tmp_path / f"ft_ddp-{rank}.pt")})
    assert_same_weights(*others, rtol=0, atol=0)
