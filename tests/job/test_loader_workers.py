"""Workers of loaders: Ctrl-C is the rank's business, and seeds are as without this pack."""

import pickle
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_multigpu.job.loader_workers import leave_interrupts_to_rank


class Tells(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[bool, float, bool]:
        return signal.getsignal(signal.SIGINT) == signal.SIG_IGN, random.random(), hasattr(random, "called_by_worker")


def called(worker_id: int) -> None:
    random.called_by_worker = worker_id  # type: ignore[attr-defined]


def told(init: Callable[[int], None] | None, rank: int = 0) -> tuple[bool, float, bool]:
    torch.manual_seed(1)
    loader = DataLoader(Tells(), batch_size=None, num_workers=1, worker_init_fn=init, multiprocessing_context="fork")
    leave_interrupts_to_rank(loader, rank)
    leave_interrupts_to_rank(loader, rank)  # as the next run with this loader does
    loader.worker_init_fn = pickle.loads(pickle.dumps(loader.worker_init_fn))  # as a spawned worker gets it
    first: tuple[bool, float, bool] = next(iter(loader))
    return first


def test_workers_ignore_interrupts() -> None:
    ignored, _, user_init = told(called)
    assert ignored
    assert user_init, "the user's worker_init_fn is called too"


def test_workers_are_seeded_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    seeded = [told(None, rank)[1] for rank in (0, 0, 1)]
    assert seeded[0] == seeded[1] != seeded[2]


def test_loaders_that_are_not_torchs_are_left_alone() -> None:
    leave_interrupts_to_rank([1, 2], 0)
