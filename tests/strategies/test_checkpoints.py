"""A checkpoint is an ordinary one of a single device, and training goes on from it wherever it was saved."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_multigpu.communication.rendezvous import RendezvousError
from lightning_multigpu.registry import StrategyRow
from tests.modules import Stream
from tests.strategies.tasks import (
    Case,
    Classifier,
    assert_same_weights,
    dataset,
    fit,
    fit_module,
    rows_of_each_class,
    state,
)
from tests.world import World, rank

CASE = Case(optimizer="groups", num_samples=29)  # 4 steps an epoch, the last of them uneven
STEPS_AN_EPOCH = 4
rows = pytest.mark.parametrize("row", rows_of_each_class(), ids=lambda row: row.name)


def saver(directory: str | Path, step: int, at_epoch_end: bool) -> ModelCheckpoint:
    when = {"every_n_epochs": step // STEPS_AN_EPOCH} if at_epoch_end else {"every_n_train_steps": step}
    return ModelCheckpoint(directory, filename="{step}", save_top_k=-1, **when)


def save(case: Case, strategy_name: str | None, ranks: int, directory: str, step: int, at_epoch_end: bool) -> None:
    callback = saver(directory, step, at_epoch_end)
    # The run is cut off well after the file was written, as a crash would do it.
    options: dict[str, Any] = {"callbacks": [callback], "enable_checkpointing": True, "max_steps": step + 2}
    fit_module(Classifier(case.optimizer), strategy_name, ranks, case, **options)


def resume(case: Case, strategy: Any, ranks: int, path: str) -> dict[str, Any]:
    module = Classifier(case.optimizer)
    trainer = fit_module(module, strategy, ranks, case, ckpt_path=path)
    return {"weights": state(module), "global_step": trainer.global_step,
            "learning_rates": module.learning_rates}  # fmt: skip


# Stock strategies load a float64 file into the float32 module and convert it then: 24 bits of the weights survive.
STOCK_RTOL = 1e-5


@functools.cache
def _never_interrupted() -> dict[str, Any]:
    return fit(CASE, None, 1)


def _assert_continues(resumed: dict[str, Any], steps_left: int) -> None:
    whole = _never_interrupted()
    assert resumed["global_step"] == whole["global_step"]
    assert len(resumed["learning_rates"]) == steps_left
    assert resumed["learning_rates"] == whole["learning_rates"][-steps_left:]
    assert_same_weights(resumed, whole)


# Steps, and whether the file is written at the end of their epoch.
WHERE = {
    "within the first epoch": (3, False),
    "at its last batch": (4, False),
    "at its end": (4, True),
    "within the second": (6, False),
    "at the second's end": (8, True),
}


def save_everywhere(strategy_name: str | None, ranks: int, directory: Path) -> None:
    """One run that saves in all these places; it is cut off well after that, as a crash would do it."""
    savers = [saver(directory / place, *WHERE[place]) for place in WHERE]
    options: dict[str, Any] = {"callbacks": savers, "enable_checkpointing": True, "max_steps": 10}
    fit_module(Classifier(CASE.optimizer), strategy_name, ranks, CASE, **options)


def file_of(directory: Path, place: str) -> Path:
    return directory / place / f"step={WHERE[place][0]}.ckpt"


@pytest.fixture(scope="module")
def files_of_one_device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("one device")
    save_everywhere(None, 1, directory)
    return directory


def resume_everywhere(strategy_name: str, ranks: int, directory: Path) -> list[dict[str, Any]]:
    return [resume(CASE, strategy_name, ranks, str(file_of(directory, place))) for place in WHERE]


@pytest.mark.parametrize("row", [r for r in rows_of_each_class() if r.name in ("ring_ddp", "dp")], ids=lambda r: r.name)
def test_resumes_from_a_single_device_file(row: StrategyRow, world2: World, files_of_one_device: Path) -> None:
    """The strategies that start ranks find the place of a file in the same code."""
    for of_rank in world2.run(resume_everywhere, row.name, 2, files_of_one_device):
        for place, resumed in zip(WHERE, of_rank, strict=True):
            _assert_continues(resumed, 3 * STEPS_AN_EPOCH - WHERE[place][0])


@rows
def test_four_ranks_resume_from_a_single_device_file(
    row: StrategyRow, world4: World, files_of_one_device: Path
) -> None:
    path = file_of(files_of_one_device, "within the first epoch")
    for result in world4.run(resume, CASE, row.name, 4, str(path)):
        _assert_continues(result, 9)


@rows
def test_the_file_is_a_single_device_file(
    row: StrategyRow, world2: World, tmp_path: Path, files_of_one_device: Path
) -> None:
    """Wherever it is saved, which the state of the loops tells; so one device, or more ranks, can resume from it."""
    world2.run(save_everywhere, row.name, 2, tmp_path)
    for place in WHERE:
        ours, theirs = (
            torch.load(file_of(directory, place), weights_only=True) for directory in (tmp_path, files_of_one_device)
        )
        assert ours.keys() == theirs.keys()
        assert list(ours["state_dict"]) == list(theirs["state_dict"])
        torch.testing.assert_close(ours["state_dict"], theirs["state_dict"], rtol=1e-9, atol=1e-11)
        (our_optimizer,), (their_optimizer,) = ours["optimizer_states"], theirs["optimizer_states"]
        assert our_optimizer["param_groups"] == their_optimizer["param_groups"]
        torch.testing.assert_close(our_optimizer["state"], their_optimizer["state"], rtol=1e-9, atol=1e-11)
        assert (ours["lr_schedulers"], ours["loops"]) == (theirs["lr_schedulers"], theirs["loops"]), place


def test_stock_strategies_resume_from_a_file(world2: World, tmp_path: Path) -> None:
    case = Case(optimizer="groups", num_samples=32)  # stock ddp repeats samples where a global batch is uneven
    world2.run(save, case, "ring_ddp", 2, str(tmp_path), 4, True)
    path = str(tmp_path / "step=4.ckpt")
    whole = fit(case, None, 1)
    for result in [resume(case, None, 1, path), *world2.run(resume, case, DDPStrategy(), 2, path)]:
        assert_same_weights(result, whole, rtol=STOCK_RTOL)
    assert Classifier.load_from_checkpoint(path, map_location="cpu") is not None


def epochs_of_other_sizes(strategy_name: str, path: str) -> list[int]:
    cases = [Case(optimizer="groups", num_samples=29, global_batch_size=size) for size in OTHER_SIZES]
    return [len(resume(case, strategy_name, 2, path)["learning_rates"]) for case in cases]


OTHER_SIZES = (4, 16)


@pytest.mark.parametrize("row", [r for r in rows_of_each_class() if r.name in ("dp", "sync_ps")], ids=lambda r: r.name)
def test_the_next_epoch_is_whole_if_its_batches_are_more_or_fewer(
    row: StrategyRow, world2: World, files_of_one_device: Path
) -> None:
    """After a save at the last of 4 batches the next epoch began at batch 4 of 8, as under stock Lightning."""
    path = str(file_of(files_of_one_device, "at its last batch"))
    for found in world2.run(epochs_of_other_sizes, row.name, path):
        assert found == [2 * -(-29 // size) for size in OTHER_SIZES]


def streams(directory: str, path: str | None) -> int:
    module = Classifier()
    saving = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    data = DataLoader(Stream(range(rank(), 12, 2)), batch_size=2)
    options: dict[str, Any] = {"callbacks": [saving], "enable_checkpointing": True, "ckpt_path": path}
    fit_module(module, "sync_ps", 2, Case(max_epochs=2), data, **options)
    return len(module.learning_rates)


def test_the_next_epoch_of_a_stream_is_whole(world2: World, tmp_path: Path) -> None:
    """After a save at the last batch of an epoch the next epoch had no batches."""
    assert world2.run(streams, str(tmp_path), None) == [6, 6]
    assert world2.run(streams, str(tmp_path), str(tmp_path / "step=3.ckpt")) == [3, 3]


class KeepsPosition(DataLoader[Any]):
    """A loader that saves and loads its own position."""

    def state_dict(self) -> dict[str, int]:
        return {"position": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Loads nothing."""


def test_a_loader_that_keeps_its_own_position_continues_as_any_other(tmp_path: Path) -> None:
    """Also from a file in which Lightning has saved that position."""
    whole, resumed = Classifier(), Classifier()
    data, options = KeepsPosition(dataset(29), batch_size=8), {"callbacks": [saver(tmp_path, 3, False)]}
    fit_module(whole, None, 1, Case(max_epochs=2), data, enable_checkpointing=True, **options)
    fit_module(resumed, "dp", 2, Case(max_epochs=2), data, ckpt_path=tmp_path / "step=3.ckpt")
    assert len(resumed.learning_rates) == len(whole.learning_rates) - 3
    assert_same_weights({"weights": state(resumed)}, {"weights": state(whole)})


def resume_as_ranks_see_it(paths: list[str]) -> dict[str, Any]:
    return resume(CASE, "ring_ddp", 2, paths[rank()])


def test_all_ranks_resume_from_the_file_of_rank_0(world2: World, files_of_one_device: Path) -> None:
    """Each rank looks for the newest file by itself: a host that saw an older one was steps behind, unnoticed."""
    older, newer = (str(file_of(files_of_one_device, f"within the {epoch}")) for epoch in ("first epoch", "second"))
    for result in world2.run(resume_as_ranks_see_it, [newer, older]):
        _assert_continues(result, 3 * STEPS_AN_EPOCH - 6)


def test_one_rank_that_begins_anew_is_refused_on_all(world2: World, files_of_one_device: Path) -> None:
    """``find_last_checkpoint(missing_ok=True)`` on a host that did not see the directory: rank 0 waited for it."""
    words = r"loads a checkpoint: yes on rank 0; no on rank 1"
    paths = [str(file_of(files_of_one_device, "at its end")), None]
    world2.run_raising(RendezvousError, words, resume_as_ranks_see_it, paths)
