"""Faults that are known and stay until tensors have owners: each test passes as soon as its fault is gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.strategies.tasks import (
    Case,
    Classifier,
    assert_same_weights,
    make_strategy,
    make_trainer,
    state,
    train_loader,
)
from tests.world import World

CASE = Case(max_epochs=2, num_samples=24)
PARTS = "parts of split layers are plain tensors to code that runs after the first batch, until every tensor has owners"


class Block(nn.Module):
    """A block that tensor_split splits, with a branch beside it that needs all hidden values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)
        self.wide, self.narrow, self.alpha = nn.Linear(6, 16), nn.Linear(16, 6), 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        return x + self.alpha * self.narrow(F.normalize(self.wide(x), dim=-1))


class Blocks(Classifier):
    """Changes in its second epoch what it reads of a block."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.reads = reads
        self.blocks = nn.Sequential(Block(), Block())
        self.hidden: list[Tensor] = []
        for block in self.blocks:
            block.up.register_forward_hook(lambda module, inputs, output: self.hidden.append(output))

    def on_train_epoch_start(self) -> None:
        for block in self.blocks if self.reads == "a branch that fades in" else ():
            block.alpha = float(self.current_epoch)

    def on_train_end(self) -> None:
        self.hidden.clear()  # their graphs keep process groups

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.hidden.clear()
        loss = F.cross_entropy(self.layers(self.blocks(batch[0])), batch[1])
        if self.current_epoch and self.reads == "hidden values":
            loss = loss + 0.1 * sum(values.abs().mean() for values in self.hidden)
        if self.current_epoch and self.reads == "a weight":
            loss = loss + 0.3 * self.blocks[1].up.weight.norm()
        return loss


def train(strategy: str | None, ranks: int, reads: str) -> dict[str, Any]:
    module = Blocks(reads)
    options = {"pipeline_parallel_size": 1} if strategy == "hybrid" else {}
    trainer = make_trainer(CASE, "auto" if strategy is None else make_strategy(strategy, **options), ranks)
    trainer.fit(module, train_loader(CASE, trainer))
    return {"weights": state(module)}


@pytest.mark.parametrize(
    ("strategy", "reads"),
    [
        pytest.param("tensor_split", "a branch that fades in", marks=pytest.mark.xfail(strict=True, reason=PARTS)),
        ("tensor_split", "a weight"),
        pytest.param("tensor_split", "hidden values", marks=pytest.mark.xfail(strict=True, reason=PARTS)),
        pytest.param("hybrid", "a weight", marks=pytest.mark.xfail(strict=True, reason=PARTS)),
    ],
)
def test_what_code_does_later(strategy: str, reads: str, world2: World) -> None:
    expected = train(None, 1, reads)
    for found in world2.run(train, strategy, 2, reads):
        assert_same_weights(found, expected)
