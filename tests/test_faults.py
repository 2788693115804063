"""Planted faults: each kind, each place, on the rank and at the step that was asked for, once."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from tests import faults
from tests.strategies.tasks import Case, Classifier, eval_loader, make_strategy, make_trainer, train_loader
from tests.world import World

CASE = Case(num_samples=32, max_epochs=3, global_batch_size=8)


class PlantedError(Exception):
    """What the faults of these tests raise."""


HERE = faults.at(rank=0)


class Progress(Callback):
    """Keeps what happened, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.events.append(f"trained {trainer.global_step}")

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        self.events.append(f"validated at {trainer.global_step}")

    def on_fit_end(self, trainer: Any, *args: Any) -> None:
        self.events.append("fit ended")


def train(fault: Callback, directory: Path, strategy: Any = "auto", ranks: int = 1, **loader: Any) -> Progress:
    """Three epochs of four steps, with validation and a checkpoint after each; the fault's exception is passed over."""
    progress = Progress()
    saves = ModelCheckpoint(directory, save_on_train_epoch_end=True)
    trainer = make_trainer(CASE, strategy, ranks, callbacks=[fault, progress, saves], enable_checkpointing=True)
    try:
        trainer.fit(Classifier(), train_loader(CASE, ranks, **loader), eval_loader())
    except PlantedError:
        progress.events.append("raised")
    return progress


class TestPlaces:
    @pytest.mark.parametrize(
        ("where", "step", "before"),
        [
            ("joining", 0, []),
            ("training", 0, []),
            ("training", 5, ["trained 5"]),
            ("backward", 5, ["trained 5"]),
            ("data", 0, []),
            ("data", 6, ["trained 6"]),
            ("validation", 5, ["trained 8"]),
            ("saving", 5, ["validated at 8"]),
            ("end of fit", 5, ["validated at 12"]),
        ],
    )
    def test_on_one_device(self, where: faults.Where, step: int, before: list[str], tmp_path: Path) -> None:
        fault = faults.at(rank=0, step=step, where=where).raise_(PlantedError("here"))
        assert train(fault, tmp_path).events[-1 - len(before) :] == [*before, "raised"]

    @pytest.mark.parametrize("step", [5])
    def test_in_a_worker_of_the_loader(self, step: int, tmp_path: Path) -> None:
        fault = faults.at(rank=0, step=step, where="data").raise_(PlantedError("here"))
        events = train(fault, tmp_path, num_workers=2).events
        assert [event for event in events if "trained" in event] == [f"trained {i + 1}" for i in range(step)]
        assert events[-1] == "raised"

    def test_only_the_rank_that_was_asked_for_and_before_it_joins(self, world2: World) -> None:
        def body() -> list[Any]:
            seen: list[Any] = []
            fault = faults.at(rank=1, where="joining").call(lambda: seen.append(dist.is_initialized()))
            trainer = make_trainer(CASE, make_strategy("ring_ddp"), 2, callbacks=[fault], max_steps=1, max_epochs=None)
            trainer.fit(Classifier(), train_loader(CASE, 2))
            dist.destroy_process_group()
            return seen

        assert world2.run(body) == [[], [False]]

    @pytest.mark.parametrize("where", ["data", "training", "backward", "validation", "saving", "end of fit"])
    def test_one_of_two_ranks(self, where: faults.Where, world2: World, tmp_path: Path) -> None:
        def body() -> int:
            struck: list[int] = []
            fault = faults.at(rank=1, step=1, where=where).call(lambda: struck.append(1))
            callbacks = [fault, ModelCheckpoint(tmp_path)]
            trainer = make_trainer(CASE, make_strategy("ring_ddp"), 2, callbacks=callbacks, enable_checkpointing=True)
            trainer.fit(Classifier(), train_loader(CASE, 2), eval_loader(batch_size=2))
            dist.destroy_process_group()
            return len(struck)

        assert world2.run(body) == [0, 1]


class TestKinds:
    @pytest.fixture
    def child(self) -> Iterator[Callable[[faults.PlantedFault], int]]:
        """Forks a process that one fault happens to, without a run around it, and returns its process id."""
        started: list[int] = []

        def start(planted: faults.PlantedFault) -> int:
            pid = os.fork()
            if pid == 0:
                try:
                    planted.fault.strike()
                except BaseException as error:
                    os._exit(42 if isinstance(error, KeyboardInterrupt | PlantedError) else 98)
                finally:
                    os._exit(99)
            started.append(pid)
            return pid

        yield start
        for pid in started:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    @pytest.mark.parametrize(
        ("planted", "status"),
        [
            (HERE.kill(), -signal.SIGKILL),
            (HERE.terminate(), -signal.SIGTERM),
            (HERE.interrupt(), 42),
            (HERE.exit(3), 3),
            (HERE.raise_(PlantedError("here")), 42),
        ],
        ids=repr,
    )
    def test_that_end_the_process(self, planted: faults.PlantedFault, status: int, child: Any) -> None:
        _, ended = os.waitpid(child(planted), 0)
        assert os.waitstatus_to_exitcode(ended) == status

    @pytest.mark.parametrize(
        ("planted", "state"),
        [(HERE.stop(), psutil.STATUS_STOPPED), (HERE.hang(), psutil.STATUS_SLEEPING)],
        ids=repr,
    )
    def test_that_leave_it_standing(self, planted: faults.PlantedFault, state: str, child: Any) -> None:
        process = psutil.Process(child(planted))
        deadline = time.monotonic() + 10
        while process.status() != state and time.monotonic() < deadline:
            time.sleep(0.02)
        assert process.status() == state

    def test_the_log_says_that_it_was_planted(self, caplog: pytest.LogCaptureFixture) -> None:
        with pytest.raises(PlantedError):
            faults.at(rank=0, step=5).raise_(PlantedError("here")).fault.strike()
        assert caplog.messages == [
            f"Planted fault, pid {os.getpid()}: rank 0, training, from step 5 on: raises PlantedError('here')"
        ]

    def test_it_happens_once(self, tmp_path: Path) -> None:
        struck: list[int] = []
        for where, step in (("training", 2), ("data", 2), ("validation", 0)):
            spot = faults.at(rank=0, step=step, where=where)  # type: ignore[arg-type]
            train(spot.call(lambda: struck.append(1)), tmp_path / where)
        assert len(struck) == 3

    def test_it_travels_to_a_spawned_process(self) -> None:
        for fault in (
            faults.at(rank=1).raise_(RuntimeError("gone")),
            faults.at(rank=1).exit(3),
            faults.at(rank=1).hang(),
        ):
            assert repr(pickle.loads(pickle.dumps(fault))) == repr(fault)


class TestMistakes:
    @pytest.mark.parametrize("where", ["training", "data"])
    def test_a_step_that_never_comes(self, where: faults.Where, tmp_path: Path) -> None:
        with pytest.warns(UserWarning, match="never happened .*step 40 on: receives SIGKILL.*ended after 12 steps"):
            train(faults.at(rank=0, step=40, where=where).kill(), tmp_path)

    def test_the_description(self) -> None:
        fault = faults.at(rank=1, step=5, where="backward").stop()
        assert repr(fault) == "PlantedFault(rank 1, backward, from step 5 on: receives SIGSTOP)"
