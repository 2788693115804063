"""Fits that end early, on all ranks at the same place: by ``trainer.should_stop`` on one rank, and by the Tuner."""

import functools
from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, LearningRateFinder
from lightning.pytorch.tuner import Tuner

from lightning_multigpu.registry import StrategyRow
from tests.strategies.tasks import (
    Case,
    Classifier,
    assert_same_weights,
    data_ranks,
    eval_loader,
    fit_module,
    make_strategy,
    make_trainer,
    rows_of_each_class,
    state,
    synchronous_rows,
    train_loader,
)
from tests.world import World

CASE = Case(num_samples=48)
PLACES = {"on_train_batch_end": 3, "on_validation_epoch_end": 4, "on_train_epoch_end": 6}


def fit_in_turns(strategy_name: str | None, ranks: int, places: Sequence[str]) -> list[tuple[int, int]]:
    """The steps, and the validations; the last rank asks for the end at each of the places of the first epoch."""
    found = []
    for place in places:
        validations: list[int] = []

        def stop(trainer: L.Trainer, *args: Any, step: int = PLACES[place]) -> None:
            trainer.should_stop |= trainer.global_step == step and trainer.global_rank == trainer.world_size - 1

        counts = LambdaCallback(
            on_validation_start=lambda trainer, _, seen=validations: seen.append(trainer.global_step)
        )
        options = {"callbacks": [LambdaCallback(**{place: stop}), counts], "val_check_interval": 2}
        trainer = fit_module(Classifier(), strategy_name, ranks, CASE, None, eval_loader(), **options)
        found.append((trainer.global_step, len(validations)))
    return found


fit_on_one_device = functools.cache(functools.partial(fit_in_turns, None, 1, tuple(PLACES)))


@pytest.mark.parametrize(
    "row", [row for row in rows_of_each_class() if row in synchronous_rows()], ids=lambda row: row.name
)
def test_a_stop_of_one_rank_is_a_stop_of_all(row: StrategyRow, world2: World) -> None:
    """The rank left the loop, and the ranks waited for each other until the timeout."""
    expected = fit_on_one_device()
    assert [steps for steps, _ in expected] == [*PLACES.values()]
    # The places share their code in all families.
    places = [*PLACES][: None if row.name == "ring_ddp" else 1]
    assert world2.run(fit_in_turns, row.name, 2, places) == [expected[: len(places)]] * 2


pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
TUNED = Case(max_epochs=3)


class Rated(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def tune(strategy_name: str | None, ranks: int, *, by_callback: bool = False) -> dict[str, Any]:
    """Finds a learning rate, then trains with it; as the Tuner's user does, or by a callback within the fit."""
    strategy = "auto" if strategy_name is None else make_strategy(strategy_name)
    options: dict[str, Any] = {"early_stop_threshold": None}
    finder = LearningRateFinder(num_training_steps=20, **options)
    trainer = make_trainer(TUNED, strategy, ranks, callbacks=[finder] if by_callback else [])
    module, loader = Rated(), train_loader(TUNED, trainer)
    found = None if by_callback else Tuner(trainer).lr_find(module, loader, num_training=20, **options)
    trainer.fit(module, loader)
    results: Any = (found or finder.optimal_lr).results  # type: ignore[union-attr]
    assert module.lr != 0.01
    return {"data ranks": data_ranks(trainer), "rate": module.lr, "loss": results["loss"], "weights": state(module)}


tune_on_one_device = functools.cache(functools.partial(tune, None, 1))

# The callback calls the Tuner.
WAYS = [(row, False) for row in rows_of_each_class()] + [(rows_of_each_class()[0], True)]


@pytest.mark.parametrize(("row", "by_callback"), WAYS, ids=lambda value: getattr(value, "name", str(value)))
def test_finds_a_learning_rate_and_trains(row: StrategyRow, by_callback: bool, world2: World) -> None:
    expected = tune_on_one_device(by_callback=by_callback)
    for result in world2.run(tune, row.name, 2, by_callback=by_callback):
        if result["data ranks"] == 1:  # else Lightning looks at the loss of each rank's own part of a batch
            assert result["loss"] == pytest.approx(expected["loss"], rel=1e-6)
            assert result["rate"] == pytest.approx(expected["rate"], rel=1e-6)
            assert_same_weights(result, expected)
