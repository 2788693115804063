"""Gradients that the user's code sets or changes between backward and the optimizer's step."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_multigpu.registry import StrategyRow
from tests.strategies.tasks import Case, Classifier, rows_with_a_whole_model, trained_weights
from tests.world import World

CASE = Case(num_samples=23, max_epochs=2)  # batches of 8, and of 7


class GivesGradients(Classifier):
    """Two losses; their gradients are combined by hand, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.automatic_optimization = way in IN_A_HOOK

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.layers(x)
        loss, self.penalty = nn.functional.cross_entropy(logits, y), logits.pow(2).mean()
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        if self.way == "all of them":
            self.give(torch.autograd.grad(loss, [*self.parameters()], retain_graph=True))
            self.add(self.gradients_of_penalty())
        elif self.way == "after backward":
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            self.add(self.gradients_of_penalty())
        elif self.way == "averages of two backward passes":
            optimizer.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            first = [p.grad.clone() for p in self.parameters() if p.grad is not None]
            optimizer.zero_grad()
            self.manual_backward(self.penalty)
            self.give(first, 1.0, 0.3)
        elif self.way == "clipped, of two backward passes over different layers":
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self.second(x[:, :1].expand(-1, 16)), y))
            self.manual_backward(self.first(x).pow(2).mean())
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        optimizer.step()
        return None

    def gradients_of_penalty(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.penalty, [*self.parameters()], retain_graph=True)

    def give(self, gradients: Any, factor: float = 1.0, factor_of_old: float = 0.0) -> None:
        for parameter, gradient in zip(self.parameters(), gradients, strict=True):
            old = 0.0 if parameter.grad is None else parameter.grad * factor_of_old
            parameter.grad = gradient * factor + old

    def add(self, gradients: Any) -> None:
        for parameter, gradient in zip(self.parameters(), gradients, strict=True):
            assert parameter.grad is not None
            parameter.grad.add_(gradient, alpha=0.3)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, retain_graph=True, **{k: v for k, v in kwargs.items() if k != "retain_graph"})

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.way == "in a hook":
            self.give(self.gradients_of_penalty(), 0.3, 1.0)
        for parameter, gradient in zip(self.parameters(), self.gradients_of_penalty(), strict=True):
            assert parameter.grad is not None
            if self.way == "through .data":
                parameter.grad.data = parameter.grad.data + 0.3 * gradient
            elif self.way == "through set_":
                parameter.grad.set_(parameter.grad + 0.3 * gradient)  # type: ignore[no-untyped-call]


IN_A_HOOK = ("in a hook", "through .data", "through set_")
WAYS = (
    "all of them",
    "after backward",
    "averages of two backward passes",
    "clipped, of two backward passes over different layers",
    *IN_A_HOOK,
)


def train(strategy: str | None, ranks: int) -> dict[str, Any]:
    case = replace(CASE, strategy={"find_unused_parameters": True} if strategy == "ring_ddp" else {})
    return {way: trained_weights(partial(GivesGradients, way), strategy, ranks, case)["weights"] for way in WAYS}


train_on_one_device = cache(partial(train, None, 1))


# ft_ddp refuses manual optimization, which half of the ways are.
ROWS = [row for row in rows_with_a_whole_model() if row.name != "ft_ddp"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_gradients_that_the_module_sets_are_averaged(row: StrategyRow, world2: World) -> None:
    """Under ddp_sharded each owner stepped with gradients of its own samples; servers took those of one worker.

    ``grad.data = ...`` moved the views of ring_ddp's and ddp_sharded's buckets, whose old contents were averaged.
    """
    for found in world2.run(train, row.name, 2):
        torch.testing.assert_close(found, train_on_one_device(), rtol=1e-9, atol=1e-11)
