"""Random numbers of training steps: which ranks draw the same ones."""

import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from lightning_multigpu.registry import STRATEGIES, StrategyRow
from tests.strategies.tasks import (
    Case,
    Classifier,
    assert_same_weights,
    fit_module,
    rows_of_each_class,
    rows_with_a_whole_model,
    state,
)
from tests.world import World

CASE = Case(max_epochs=2, num_samples=32)
GENERATORS: tuple[Callable[[], Any], ...] = (lambda: torch.rand(()), random.random, numpy.random.rand)


class Draws(Classifier):
    """Draws a number from each generator in each step, before its layers.

    Where ranks share a batch, rank 0 draws from one of the generators before each step as well, in turns.
    """

    def __init__(self, *, has_own_batches: bool) -> None:
        super().__init__()
        self.has_own_batches = has_own_batches
        self.draws: dict[tuple[int, int], set[tuple[float, ...]]] = defaultdict(set)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero and not self.has_own_batches:
            GENERATORS[batch_idx % 3]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.draws[self.current_epoch, batch_idx].add(tuple(float(draw()) for draw in GENERATORS))
        return super().training_step(batch, batch_idx)


class DropsLayers(Classifier):
    """Leaves a layer out by a draw, as LayerDrop does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        drops = bool(torch.rand(()) < 0.5)
        x = batch[0].sum(dim=1, keepdim=True).expand(-1, 16) if drops else self.layers[1](self.first(batch[0]))
        return torch.nn.functional.cross_entropy(self.second(x), batch[1])


@contextmanager
def seeded(is_seeded: bool) -> Iterator[None]:
    """Within the block seed_everything has been called, or has not, whatever earlier tests have done."""
    before = {name: os.environ.pop(name) for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS") if name in os.environ}
    torch.manual_seed(7)
    random.seed(5)
    numpy.random.seed(6)
    if is_seeded:
        L.seed_everything(0, verbose=False)  # the seed of the one device's sampler
    try:
        yield
    finally:
        for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
            os.environ.pop(name, None)
        os.environ.update(before)


def draws(
    name: str | None, ranks: int = 2, *, has_own_batches: bool = False, is_seeded: bool = False
) -> dict[tuple[int, int], set[tuple[float, ...]]]:
    """What a rank draws in each step, from torch, Python and NumPy; a pipeline does so for each micro-batch."""
    module = Draws(has_own_batches=has_own_batches)
    with seeded(is_seeded):
        fit_module(module, name, ranks, CASE)
    return {key: values for key, values in module.draws.items() if key > (0, 0)}  # the first one has trials


def draws_in_turns(name: str, has_own_batches: bool, seeded: Sequence[bool]) -> list[dict[Any, Any]]:
    return [draws(name, has_own_batches=has_own_batches, is_seeded=is_seeded) for is_seeded in seeded]


RANKED = [row for row in STRATEGIES if row in rows_of_each_class() or row.name == "async_ps"]
RANKED = [row for row in RANKED if row.strategy.starts_ranks]


@pytest.mark.parametrize("row", RANKED, ids=lambda row: row.name)
def test_which_ranks_draw_the_same_numbers(row: StrategyRow, world2: World) -> None:
    """Without seed_everything all ranks added the same noise to their samples."""
    has_own_batches = row in rows_with_a_whole_model() or not row.synchronous
    seeded = (False, True) if has_own_batches and row.synchronous else (False,)
    first, second = world2.run(draws_in_turns, row.name, has_own_batches, seeded)
    if has_own_batches:
        of_torch = [{drawn for values in each[0].values() for drawn, *_ in values} for each in (first, second)]
        assert of_torch[0].isdisjoint(of_torch[1])
    if row.synchronous:
        assert first[-1] == second[-1]
    if row.name == "tensor_split":  # whose split layers draw from torch's generator too
        alone = draws(None, 1)
        of_others = [{key: {drawn[1:] for drawn in values} for key, values in each.items()} for each in (*first, alone)]
        assert of_others[0] == of_others[1]


class Gives(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "drawn": torch.rand(1)}


def test_replicas_of_dp_draw_different_numbers() -> None:
    drawn: list[float] = []
    notes = LambdaCallback(on_train_batch_end=lambda _, __, outputs, *___: drawn.extend(outputs["drawn"].tolist()))
    with seeded(False):
        fit_module(Gives(), "dp", 2, CASE, callbacks=[notes])
    assert len(drawn) == len({*drawn}) == 2 * 8


def train(names: Sequence[str | None], ranks: int) -> list[dict[str, Any]]:
    found = []
    for name in names:
        options = {"find_unused_parameters": True} if name in ("ring_ddp", "ddp_sharded") else {}
        module = DropsLayers()  # made before, since Lightning seeds ranks again when they begin
        with seeded(True):
            fit_module(module, name, ranks, replace(CASE, strategy=options))
        found.append({"weights": state(module)})
    return found


def test_layers_that_draws_leave_out(world2: World) -> None:
    """After seed_everything all ranks leave out the layers that one device leaves out."""
    [expected] = train([None], 1)
    for of_rank in world2.run(train, [row.name for row in rows_with_a_whole_model()], 2):
        for found in of_rank:
            assert_same_weights(found, expected)
