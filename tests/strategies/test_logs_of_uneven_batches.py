"""Logs of batches of which ranks have parts of different sizes, and of a last batch with fewer samples than ranks."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategies.tasks import Case, Classifier, fit_module, make_strategy, rows_with_a_whole_model
from tests.world import World


class Logs(Classifier):
    """Logs values of every reduction, by their steps too, and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = torch.nn.functional.cross_entropy(logits, y)
        self.log("mean", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(y))
        self.log_dict({"sum": float(len(y))}, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.log("max", x[:, 0].max(), on_step=False, on_epoch=True, sync_dist=True, reduce_fx=torch.max)
        self.log("min", x[:, 0].min(), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="min")
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(float(self.trainer.callback_metrics["mean_step"]))


CASES = [
    Case(num_samples=25, max_epochs=2),  # a last batch of 1
    Case(num_samples=27, max_epochs=1, trainer={"accumulate_grad_batches": 2}),  # of 3
]
SPLIT = {"gpipe": {"pipeline_parallel_size": 2}, "tensor_split": {"tensor_parallel_size": 2}}


def logged(names: Sequence[str | None], ranks: int) -> list[dict[str, Any]]:
    found = []
    for name, case in itertools.product(names, CASES):
        module = Logs()
        strategy = make_strategy(name, **SPLIT[name]) if name in SPLIT else name
        trainer = fit_module(module, strategy, ranks, case)
        epoch = {key: float(value) for key, value in trainer.callback_metrics.items() if key != "mean"}
        found.append({**epoch, "steps": module.steps})
    return found


def assert_same_logs(names: Sequence[str], world: World) -> None:
    expected = logged([None], 1) * len(names)
    for found in world.run(logged, names, world.num_ranks):
        for own, alone in zip(found, expected, strict=True):
            assert own == {key: pytest.approx(value, rel=1e-9) for key, value in alone.items()}


def test_logs_of_uneven_batches(world2: World) -> None:
    """A rank without a sample counted the batch that it repeats, and step values were means without weights."""
    assert_same_logs([row.name for row in rows_with_a_whole_model()], world2)


def test_logs_of_uneven_batches_of_several_models(world4: World) -> None:
    assert_same_logs([*SPLIT], world4)
