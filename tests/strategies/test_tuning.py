"""Lightning's Tuner ends a fit in its middle, as a regular end: what it finds is that of one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner

from lightning_multigpu.registry import StrategyRow
from tests.strategies.tasks import (
    Case,
    Classifier,
    assert_same_weights,
    data_ranks,
    make_strategy,
    make_trainer,
    rows_of_each_class,
    state,
    train_loader,
)
from tests.world import World

pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
CASE = Case(max_epochs=3)


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
    trainer = make_trainer(CASE, strategy, ranks, callbacks=[finder] if by_callback else [])
    module, loader = Rated(), train_loader(CASE, trainer)
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
