"""Losses that depend on no parameter, or on none of the layers: a batch that is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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

CASE = Case(num_samples=32, max_epochs=2)
LEFT_OUT = {1, 5}


class LeavesOut(Classifier):
    """Leaves two batches out, or trains its head alone with them."""

    def __init__(self, *, with_head: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.head = nn.Linear(3, 3)
        self.head.weight.data = torch.randn(3, 3, generator=generator)
        self.head.bias.data.zero_()
        self.with_head = with_head

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        number = self.trainer.fit_loop.epoch_loop.total_batch_idx
        if number in LEFT_OUT and not self.with_head:
            return torch.zeros((), dtype=logits.dtype, requires_grad=True)
        logits = self.head(logits.detach() if number in LEFT_OUT else logits)
        return nn.functional.cross_entropy(logits, batch[1])


def train(strategy: str | None, ranks: int) -> list[dict[str, Any]]:
    found = []
    for with_head, accumulate in ((False, 1), (False, 2), (True, 1)):
        options: dict[str, Any] = {}
        if strategy == "hybrid":
            options = {"pipeline_parallel_size": 2, "tensor_parallel_size": 1}
        made = "auto" if strategy is None else make_strategy(strategy, **options)
        module = LeavesOut(with_head=with_head)
        trainer = make_trainer(CASE, made, ranks, accumulate_grad_batches=accumulate)
        trainer.fit(module, train_loader(CASE, trainer))
        found.append({"weights": state(module)})
    return found


@pytest.mark.parametrize("strategy", ["pipeline_1f1b", "pipeline_zero_bubble", "hybrid"])
def test_a_batch_that_is_left_out(strategy: str, world2: World) -> None:
    """Stages before the last one stepped with gradients of zero, and momentum moved their weights."""
    expected = train(None, 1)
    for found in world2.run(train, strategy, 2):
        for own, alone in zip(found, expected, strict=True):
            assert_same_weights(own, alone)
