"""Layers that are computed again in backward train as layers that are not, dropout included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_multigpu import PipelineStrategy
from tests.strategies.pipeline.fitted import fitted
from tests.strategies.pipeline.test_pipeline import Block, ByHand, TinyGPT, assert_same, pipeline, train
from tests.strategies.tasks import Classifier
from tests.world import World


def test_trains_as_on_one_device(world2: World) -> None:
    assert_same(world2.run(pipeline, 2, activation_checkpointing=True), train(ByHand(), "auto", 1))


def test_tied_weights_and_some_layers(world2: World) -> None:
    results = world2.run(pipeline, 2, tied=True, activation_checkpointing=["blocks.0", "blocks.2"])
    assert_same(results, train(ByHand(tied=True), "auto", 1))


FORWARDS: list[bool] = []


class CountedBlock(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        FORWARDS.append(torch.is_grad_enabled())
        return super().forward(x, mask)


class CountedGPT(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = CountedBlock()
        self.blocks[2] = CountedBlock()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.current_epoch == batch_idx == 0:  # the first batch is also watched, to find which stages use what
            FORWARDS.clear()


def count(choice: Any) -> int:
    """Forward passes with gradients behind the first batch of the counted blocks: each of two ranks has one."""
    FORWARDS.clear()
    strategy = PipelineStrategy(num_micro_batches=4, activation_checkpointing=choice, verify_steps=0)
    train(CountedGPT(), strategy, 2)
    return sum(FORWARDS)


@pytest.mark.parametrize(("choice", "last", "first"), [([CountedBlock], 2, 2), (["blocks.1"], 1, 2)])
def test_layers_run_again_where_it_was_asked_for(choice: Any, last: int, first: int, world2: World) -> None:
    num_micro_batches = (2 * 4 - 1) * 4  # epochs, batches
    assert world2.run(count, choice) == [last * num_micro_batches, first * num_micro_batches]


def test_layers_that_do_not_exist_are_named(world2: World) -> None:
    words = r"activation_checkpointing=\['Conv2d'\] names no layer of 'layers'"
    world2.run_raising(ValueError, words, fitted, Classifier, activation_checkpointing=["Conv2d"])
