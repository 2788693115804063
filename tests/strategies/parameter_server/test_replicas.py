"""Servers that are killed while the Trainer trains: their replicas take over."""

from __future__ import annotations

import os
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from tests.strategies.parameter_server.test_asynchronous_training import ABSENT_GROUP, EVERY, Seen, trained_on
from tests.strategies.parameter_server.test_asynchronous_training import fit as fit_asynchronously
from tests.strategies.tasks import Case, Classifier, eval_loader, make_strategy, make_trainer, state, train_loader
from tests.world import World

REPLICATED = {"replicas": 1, "num_servers": 2}
GONE = (
    r"parameter server {0} of 2 \(127.0.0.1 port \d+\) has ended: .*; the replica of parameter server {0} of 2 "
    r"\(.*\) has taken over, and the job ends if that ends too \(pid \d+, which was ended by SIGKILL\)$"
)


class Kills(Callback):
    """Kills processes of servers in a hook of rank 0, once it has made two steps: places in the order of starting."""

    def __init__(self, hook: str, *places: int) -> None:
        self._places = list(places)
        setattr(self, hook, self._kill)

    def _kill(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step >= 2 and not trainer.sanity_checking:
            for place in self._places:
                process = trainer.strategy._processes[place]._process
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
            self._places.clear()


def fit(hook: str, *places: int, directory: str) -> tuple[dict[str, Any], list[str], Any]:
    case = Case(optimizer="adamw", max_epochs=2, strategy=REPLICATED)
    saves = ModelCheckpoint(directory, every_n_train_steps=3, save_last=True)
    trainer = make_trainer(
        case,
        make_strategy("sync_ps", **case.strategy),
        2,
        gradient_clip_val=0.05,
        callbacks=[Kills(hook, *places), saves],
        enable_checkpointing=True,
        num_sanity_val_steps=0,
    )
    module = Classifier("adamw")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module, train_loader(case, trainer), eval_loader())
    saved = None
    if trainer.is_global_zero:
        (optimizer,) = torch.load(saves.last_model_path, weights_only=True)["optimizer_states"]
        saved = optimizer["state"]
    return (
        state(module),
        [str(warning.message) for warning in told if "parameter server" in str(warning.message)],
        saved,
    )


@pytest.mark.parametrize(
    ("hook", "place"),
    [("on_train_batch_start", 0), ("on_before_zero_grad", 1), ("on_save_checkpoint", 1), ("on_train_end", 0)],
)
def test_training_goes_on_bit_for_bit(world2: World, tmp_path: Path, hook: str, place: int) -> None:
    undisturbed = world2.run(lambda: fit("on_train_batch_start", directory=str(tmp_path / "0")))
    disturbed = world2.run(lambda: fit(hook, place, directory=str(tmp_path / "1")))
    for (weights, told, saved), (expected, told_before, expected_saved) in zip(disturbed, undisturbed, strict=True):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
        assert told_before == []
        torch.testing.assert_close(saved, expected_saved, rtol=0, atol=0)
        assert len(told) == (saved is not None), "rank 0 says so, once"
        assert all(re.match(GONE.format(place), text) for text in told)


def test_the_end_of_a_server_and_its_replica_ends_the_job(world2: World, tmp_path: Path) -> None:
    words = r"parameter server 1 of 2 \(.*\) has ended: .*; .*parameter server 1 of 2 \(.*\) had ended before"
    world2.run_raising(RuntimeError, words, lambda: fit("on_train_batch_start", 1, 3, directory=str(tmp_path)))


@ABSENT_GROUP
@pytest.mark.parametrize("place", [0, 1, 2], ids=["the queue of batches", "another server", "a replica"])
def test_asynchronous_ranks_train_on_each_sample_once(world2: World, place: int) -> None:
    def run() -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*parameter server .* has ended")
            return fit_asynchronously(Seen(), {}, REPLICATED, callbacks=[Kills("on_train_batch_start", place)])

    results = world2.run(run)
    assert trained_on(results) == dict.fromkeys(range(3), EVERY)
    first, second = results
    assert all(torch.equal(first["weights"][name], value) for name, value in second["weights"].items())
