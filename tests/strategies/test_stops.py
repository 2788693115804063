"""``trainer.should_stop`` on one rank stops all ranks, at the same place."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import LambdaCallback

from lightning_multigpu.registry import StrategyRow
from tests.strategies.tasks import Case, Classifier, eval_loader, fit_module, rows_of_each_class, synchronous_rows
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
