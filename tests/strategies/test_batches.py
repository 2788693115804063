"""Batches that are objects of the user's train as the tensors in them do on one device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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


def fields(samples: list[tuple[Tensor, Tensor]]) -> Fields:
    return Fields(*train_loader(CASE, 1).collate_fn(samples))


class OfObjects(Classifier):
    """Works on its batch in place, so that one that is computed twice must be a copy."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert isinstance(batch, Fields)
        assert batch.name == "digits"
        batch.x.mul_(0.5)
        return super().training_step((batch.x + batch.scaled, batch.y), batch_idx)


def train(strategy: Any, ranks: int) -> dict[str, Any]:
    module = OfObjects()
    loader = train_loader(CASE, 1)
    trainer = make_trainer(CASE, strategy, ranks)
    trainer.fit(module, DataLoader(loader.dataset, batch_size=8, sampler=loader.sampler, collate_fn=fields))
    return {"weights": state(module), "seen": module.seen}


def pipeline() -> dict[str, Any]:
    return train(PipelineStrategy(num_micro_batches=4, balance="memory", start_method="popen"), 2)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection")  # of its name
def test_objects_train_as_on_one_device(world2: World) -> None:
    reference = train("auto", 1)
    results = world2.run(pipeline)
    for result in results:
        assert_same_weights(result, reference)
    assert results[0]["seen"] == [(pytest.approx(loss), size) for loss, size in reference["seen"]]
