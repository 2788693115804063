"""Modules that step their optimizers themselves train under tensor_split as on one device."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from tests.modules import TwoOptimizers
from tests.strategies.tasks import Case, assert_same_weights, fit_module, state
from tests.world import World


class Closures(TwoOptimizers):
    """Gives its optimizers closures, and clamps weights in its step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step(closure=functools.partial(self.closure, optimizer, *batch))
        for parameter in self.second.parameters():
            parameter.data.clamp_(-0.3, 0.3)

    def closure(self, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(self.second(self.first(x).tanh()), y)
        self.manual_backward(loss)
        return loss


def train(kind: type[TwoOptimizers], ranks: int, **options: Any) -> dict[str, Any]:
    module, case = kind(), Case(max_epochs=1, strategy=options)
    trainer: Any = fit_module(module, "tensor_split" if ranks > 1 else None, ranks, case)
    assert ranks == 1 or trainer.strategy.split_plan().blocks
    return {"weights": state(module), "steps": trainer.global_step}


def test_closures_train_as_one_device_does(world2: World) -> None:
    """Refused while splits were compared by the loss of a step; the trial of a split must not step, clamp or count."""
    expected = train(Closures, 1)
    for found in world2.run(train, Closures, 2):
        assert_same_weights(found, expected)
        assert found["steps"] == expected["steps"]


def test_groups_side_by_side_average_what_is_stepped_by_hand(world4: World) -> None:
    expected = train(TwoOptimizers, 1)
    for found in world4.run(train, TwoOptimizers, 4, data_parallel_size=2, find_unused_parameters=True):
        assert_same_weights(found, expected)
        assert found["steps"] == expected["steps"]
