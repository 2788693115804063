"""The port that a run has chosen stays its own until rank 0 listens there."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from typing import Any

import pytest

from lightning_multigpu.job.launchers import script_launcher, spawn_launcher
from tests.strategies.tasks import Case, Classifier, make_trainer, train_loader


class RanksWouldStartError(Exception):
    """The ranks would start now."""


def is_free(port: int) -> bool:
    with socket.socket() as other:
        try:
            other.bind(("", port))
        except OSError:
            return False
    return True


@pytest.mark.parametrize(
    ("name", "launcher"), [("ring_ddp", script_launcher), ("ring_ddp_spawn", spawn_launcher)], ids=["script", "spawn"]
)
@pytest.mark.parametrize("named", [False, True], ids=["chosen", "the user's"])
def test_ranks_start_while_the_port_is_held(
    name: str, launcher: Any, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    free: dict[int, bool] = {}

    def look(run: Any) -> None:
        free[run.main_port] = is_free(run.main_port)
        raise RanksWouldStartError

    monkeypatch.setattr(launcher, "start_guardian", look)
    with ExitStack() as held:
        monkeypatch.setattr(script_launcher, "_HELD", held)
        case = Case(num_samples=16)
        trainer = make_trainer(case, name, 2)
        if named:
            monkeypatch.setenv("MASTER_PORT", str(trainer.strategy.run_context.main_port))  # type: ignore[attr-defined]
        with pytest.raises(RanksWouldStartError):
            trainer.fit(Classifier(), train_loader(case, trainer))
    assert list(free.values()) == [named]
    assert ("MASTER_PORT" in os.environ) == named
    assert all(map(is_free, free))
