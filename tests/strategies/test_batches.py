"""Batches that are objects of the user's train as the tensors in them do on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_multigpu import PipelineStrategy
from tests.strategies.tasks import Case, Classifier, assert_same_weights, make_trainer, state, train_loader
from tests.world import World

CASE = Case(max_epochs=2, num_samples=30)


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


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def fields(samples: list[tuple[Tensor, Tensor]]) -> Fields:
    return Fields(*train_loader(CASE, 1).collate_fn(samples))


def pair(samples: list[tuple[Tensor, Tensor]]) -> Pair:
    return Pair(*train_loader(CASE, 1).collate_fn(samples))


class OfObjects(Classifier):
    """Works on its batch in place, so that one that is computed twice must be a copy."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert isinstance(batch, Fields | Pair)
        batch.x.mul_(0.5)
        x = batch.x
        if isinstance(batch, Fields):
            assert batch.name == "digits"
            x = x + batch.scaled
        return super().training_step((x, batch.y), batch_idx)


def train(collate: Callable[[Any], Any], strategy: Any, ranks: int) -> dict[str, Any]:
    module = OfObjects()
    loader = train_loader(CASE, 1)
    trainer = make_trainer(CASE, strategy, ranks)
    trainer.fit(module, DataLoader(loader.dataset, batch_size=8, sampler=loader.sampler, collate_fn=collate))
    return {"weights": state(module), "seen": module.seen}


def pipeline(collate: Callable[[Any], Any], balance: str) -> dict[str, Any]:
    return train(collate, PipelineStrategy(num_micro_batches=4, balance=balance, start_method="popen"), 2)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection")  # of its name
@pytest.mark.parametrize("balance", ["parameters", "memory"])
@pytest.mark.parametrize("collate", [fields, pair])
def test_objects_train_as_on_one_device(collate: Callable[[Any], Any], balance: str, world2: World) -> None:
    reference = train(collate, "auto", 1)
    results = world2.run(pipeline, collate, balance)
    for result in results:
        assert_same_weights(result, reference)
    assert results[0]["seen"] == [(pytest.approx(loss), size) for loss, size in reference["seen"]]
