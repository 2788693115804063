"""The ranks of a tensor group train on the same batch, whatever their loaders draw."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.strategies.tasks import Case, assert_same_weights, make_strategy, make_trainer, state
from tests.world import World


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
    chosen = "auto" if strategy is None else make_strategy(strategy)
    make_trainer(Case(max_epochs=1), chosen, ranks, use_distributed_sampler=False).fit(module, loader)
    return {"weights": state(module)}


@pytest.mark.parametrize("strategy", ["tensor_split", "hybrid"])
def test_loaders_that_shuffle_by_themselves(world2: World, strategy: str) -> None:
    reference = train(None, 1)
    for result in world2.run(train, strategy, 2):
        assert_same_weights(result, reference)
