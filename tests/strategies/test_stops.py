"""``trainer.should_stop`` on one rank stops all ranks, at the same place."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest

from lightning_multigpu.registry import StrategyRow
from tests.strategies.tasks import Case, Classifier, eval_loader, fit_module, rows_of_each_class, synchronous_rows
from tests.world import World

CASE = Case(num_samples=48)
PLACES = {"on_train_batch_end": 3, "on_validation_epoch_end": 4, "on_train_epoch_end": 6}


class Stops(L.Callback):
    """The last rank asks for the end of training at a place of the first epoch."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.validations = 0
        setattr(self, place, self.stop)

    def stop(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == PLACES[self.place] and trainer.global_rank == trainer.world_size - 1:
            trainer.should_stop = True

    def on_validation_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.validations += 1


def fit_in_turns(strategy_name: str | None, ranks: int, places: Sequence[str]) -> list[tuple[int, int]]:
    """The steps, and the validations, with a stop at each of the places."""
    found = []
    for place in places:
        stops = Stops(place)
        options = {"callbacks": [stops], "val_check_interval": 2}
        trainer = fit_module(Classifier(), strategy_name, ranks, CASE, None, eval_loader(), **options)
        found.append((trainer.global_step, stops.validations))
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
