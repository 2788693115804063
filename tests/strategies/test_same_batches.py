"""The ranks of a tensor group train on the same batch, by the same decisions, whatever their loaders and hooks draw."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.strategies.tasks import Case, assert_same_weights, fit_module, state
from tests.world import World

CASE = Case(max_epochs=1, trainer={"use_distributed_sampler": False})


class Regressor(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.layers(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(strategy: str | None, ranks: int) -> dict[str, Any]:
    """Each rank shuffles in an order of its own."""
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(16, 4, generator=numbers), torch.randn(16, 2, generator=numbers))
    order = torch.Generator().manual_seed(int(os.environ.get("LOCAL_RANK", 0)))
    module = Regressor()
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=order)
    fit_module(module, strategy, ranks, CASE, loader)
    return {"weights": state(module)}


@pytest.mark.parametrize("strategy", ["tensor_split", "hybrid"])
def test_loaders_that_shuffle_by_themselves(world2: World, strategy: str) -> None:
    reference = train(None, 1)
    for result in world2.run(train, strategy, 2):
        assert_same_weights(result, reference)


GENERATORS: dict[str, Callable[[], Any]] = {
    "Python": random.random,
    "NumPy": numpy.random.rand,
    "torch": lambda: torch.rand(()),
}


class Deciding(Regressor):
    """Leaves out layers by random numbers; a hook of rank 0 draws from one of the generators as well."""

    def __init__(self, hook: str, generator: str) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(4))
        self.first, *others = blocks
        self.others = nn.ModuleList(others)
        self.decisions: list[list[bool]] = []
        self.draw = GENERATORS[generator]
        vars(self)[hook] = lambda *_: self.draw() if self.trainer.is_global_zero else None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x = self.first(x)
        self.decisions.append([float(draw()) < 0.5 for draw in GENERATORS.values()])
        for runs, layer in zip(self.decisions[-1], self.others, strict=True):
            x = x + layer(x) if runs else x
        return F.mse_loss(x[:, :2], y)


def decide(ranks: int, hook: str, generator: str) -> dict[str, Any]:
    random.seed(5)
    numpy.random.seed(6)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 4, generator=numbers), torch.randn(48, 2, generator=numbers))
    module = Deciding(hook, generator)
    torch.manual_seed(7)
    fit_module(module, None if ranks == 1 else "tensor_split", ranks, CASE, DataLoader(data, batch_size=4))
    return {"weights": state(module), "decisions": module.decisions}


@pytest.mark.parametrize(
    ("hook", "generator"),
    [("on_train_batch_start", "torch"), ("on_train_batch_start", "Python"), ("on_train_batch_end", "NumPy")],
)
def test_steps_decide_by_the_same_random_numbers(world2: World, hook: str, generator: str) -> None:
    """Ranks ran other layers, and waited for each other forever or changed weights that all of them hold."""
    results = world2.run(decide, 2, hook, generator)
    assert_same_weights(results[0], results[1])
    first, second = (
        [drawn for *drawn, _ in each["decisions"][-12:]] for each in (results[0], decide(1, hook, generator))
    )
    assert results[0]["decisions"] == results[1]["decisions"]
    assert first == second, "those of one device; torch's are not, since split layers draw from its generator too"
