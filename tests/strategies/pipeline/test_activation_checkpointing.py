"""Layers that are computed again in backward train as layers that are not, dropout included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_multigpu import PipelineStrategy
from tests.strategies.pipeline.fitted import fitted
from tests.strategies.pipeline.test_pipeline import Block, ByHand, TinyGPT, assert_same, train
from tests.strategies.tasks import Classifier
from tests.world import World

FORWARDS: list[bool] = []


class CountedBlock(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        FORWARDS.append(torch.is_grad_enabled())
        return super().forward(x, mask)


class CountedGPT(TinyGPT):
    """Two of its blocks are counted; its head is tied."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        for block in self.blocks[1:3]:
            block.__class__ = CountedBlock

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 0:  # the first batch is also watched, to find which stages use what
            FORWARDS.clear()


def train_counted(choice: Any) -> dict[str, Any]:
    """Also gives the number of forward passes behind the first batch; each of two ranks has one counted block."""
    FORWARDS.clear()
    strategy = PipelineStrategy(num_micro_batches=4, activation_checkpointing=choice, verify_steps=0)
    result = train(CountedGPT(), strategy, 2, max_epochs=1)
    return {**result, "forwards": sum(FORWARDS)}


@pytest.fixture(scope="module")
def by_hand() -> dict[str, Any]:
    return train(ByHand(tied=True), "auto", 1, max_epochs=1)


@pytest.mark.parametrize(("choice", "last", "first"), [(True, 2, 2), ([CountedBlock], 2, 2), (["blocks.1"], 1, 2)])
def test_layers_run_again_where_it_was_asked_for(
    choice: Any, last: int, first: int, by_hand: dict[str, Any], world2: World
) -> None:
    results = world2.run(train_counted, choice)
    assert_same(results, by_hand)
    num_micro_batches = (4 - 1) * 4
    assert [result["forwards"] for result in results] == [last * num_micro_batches, first * num_micro_batches]


def test_layers_that_do_not_exist_are_named(world2: World) -> None:
    words = r"activation_checkpointing=\['Conv2d'\] names no layer of 'layers'"
    world2.run_raising(ValueError, words, fitted, Classifier, activation_checkpointing=["Conv2d"])
