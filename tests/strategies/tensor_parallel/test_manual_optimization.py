"""Modules that step their optimizers themselves train under tensor_split as on one device."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from tests.modules import TwoOptimizers
from tests.strategies.tasks import Case, assert_trains_alike
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


def test_closures_train_as_one_device_does(world2: World) -> None:
    """Refused while splits were compared by the loss of a step; the trial of a split must not step, clamp or count."""
    assert_trains_alike(world2, Closures, "tensor_split", Case(max_epochs=1))


def test_groups_side_by_side_average_what_is_stepped_by_hand(world4: World) -> None:
    options = {"tensor_parallel_size": 2, "find_unused_parameters": True}
    assert_trains_alike(world4, TwoOptimizers, "tensor_split", Case(max_epochs=1, strategy=options))
