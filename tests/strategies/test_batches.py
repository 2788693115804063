"""Batches that are objects of the user's, and loaders that shuffle by themselves, train as on one device."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.strategies.tasks import Case, Classifier, assert_trains_alike, dataset, train_loader
from tests.world import World

CASE = Case(max_epochs=2, num_samples=30, strategy={"num_micro_batches": 4, "balance": "memory"})


@dataclass
class Fields:
    """What ``__post_init__`` derives must not be derived again of a part."""

    x: Tensor
    y: Tensor
    name: str = "digits"
    scaled: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.scaled = 0.5 * self.x
        self.x = self.x + 1


def fields(samples: list[tuple[Tensor, Tensor]]) -> Fields:
    return Fields(*train_loader(CASE, 1).collate_fn(samples))


class OfObjects(Classifier):
    """Works on its batch in place, so that one that is computed twice must be a copy."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert isinstance(batch, Fields)
        assert batch.name == "digits"
        batch.x.mul_(0.5)
        return super().training_step((batch.x + batch.scaled, batch.y), batch_idx)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection")  # of its name
def test_objects_train_as_on_one_device(world2: World) -> None:
    loader = train_loader(CASE, 1)
    data = DataLoader(loader.dataset, batch_size=8, sampler=loader.sampler, collate_fn=fields)
    assert_trains_alike(world2, OfObjects, "pipeline_1f1b", CASE, data=data)


def shuffled() -> DataLoader[Any]:
    """Each rank shuffles in an order of its own."""
    order = torch.Generator().manual_seed(int(os.environ.get("LOCAL_RANK", 0)))
    return DataLoader(dataset(16), batch_size=4, shuffle=True, generator=order)


def test_ranks_of_a_tensor_group_train_on_the_same_batch_whatever_their_loaders_draw(world2: World) -> None:
    case = Case(max_epochs=1, trainer={"use_distributed_sampler": False})
    assert_trains_alike(world2, Classifier, ("tensor_split", "hybrid"), case, data=shuffled)
