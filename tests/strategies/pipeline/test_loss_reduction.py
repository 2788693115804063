"""Losses of micro-batches, whatever they are means or sums over, give the gradients and logs of one device."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_multigpu import PipelineStrategy
from tests.strategies.pipeline.fitted import outcome
from tests.strategies.tasks import Case, assert_same_weights, make_trainer
from tests.world import World

LENGTH, FEATURES, CLASSES, IGNORED = 3, 4, 5, -100
Batch = dict[str, Tensor]


def tagged(num_samples: int) -> Any:
    """Sequences of which sample i has i modulo 4 targets: every fourth one has none."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(num_samples, LENGTH, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (num_samples, LENGTH), generator=generator)
    for index in range(num_samples):
        y[index, index % 4 :] = IGNORED
    return [{"x": features, "y": targets} for features, targets in zip(x, y, strict=True)]


def num_targets(batch: Batch) -> float:
    return float((batch["y"] != IGNORED).sum())


def mean_over_targets(logits: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORED)


def quotient(logits: Tensor, y: Tensor) -> Tensor:
    """The same by hand: without targets 0 / 0, and NaN gradients of everything."""
    mask = (y != IGNORED).to(logits.dtype)
    likelihoods = logits.log_softmax(-1).gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(likelihoods * mask).sum() / mask.sum()


def sum_over_samples(logits: Tensor, y: Tensor) -> Tensor:
    return 0.02 * logits.square().sum()


def mean_over_samples(logits: Tensor, y: Tensor) -> Tensor:
    return logits.square().mean()


class Tagger(L.LightningModule):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, CLASSES))
        self.loss = loss
        self.losses: list[float] = []
        self.logged: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(self.layers(batch["x"]), batch["y"])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        weighted = {"sync_dist": True, "batch_size": int(num_targets(batch)), "on_step": False, "on_epoch": True}
        self.log("by_target", loss, **weighted)
        self.log("with_batch_size", 3 * loss + 1, **weighted)
        self.log("without", 3 * loss + 1)
        self.log("samples", float(len(batch["y"])), reduce_fx="sum", sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.logged.append(float(self.trainer.callback_metrics["train_loss_step"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


CASE = Case(max_epochs=1, trainer={"accumulate_grad_batches": 2})


def train(loss: Any, ranks: int = 2, batch_size: int = 8, **options: Any) -> dict[str, Any]:
    """5 batches an epoch, the last of 5 samples."""
    module = Tagger(loss)
    strategy = PipelineStrategy(**{"num_micro_batches": 4, **options}) if ranks > 1 else "auto"
    trainer = make_trainer(CASE, strategy, ranks)
    data = tagged(37)
    # One device gets the order that Lightning's injected sampler has on several.
    order = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=0) if ranks == 1 else None
    try:
        trainer.fit(module, DataLoader(data, batch_size=batch_size, sampler=order))
    except ValueError as error:
        raise ValueError(f"{error} | after the losses {module.losses}") from error
    return {**outcome(module, trainer), "logged": module.logged}


# Logged values that are means over something else than micro-batches are weighted by.
OTHER_MEANS: dict[Any, tuple[str, ...]] = {
    mean_over_samples: ("with_batch_size",),
    sum_over_samples: ("with_batch_size", "without"),
}


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (mean_over_samples, {}),
        (sum_over_samples, {"loss_reduction": "sum"}),
        (mean_over_targets, {"loss_reduction": num_targets, "num_micro_batches": 8}),
        (quotient, {"loss_reduction": num_targets, "num_micro_batches": 8, "schedule": "zero_bubble"}),
    ],
)
def test_trains_as_one_device(loss: Any, options: dict[str, Any], world2: World) -> None:
    reference = train(loss, 1)
    for result in world2.run(train, loss, **options):
        assert_same_weights(result, reference, atol=1e-12)
        assert result["losses"] == pytest.approx(reference["losses"], rel=1e-9)
        assert result["logged"] == pytest.approx([2 * loss for loss in reference["losses"]], rel=1e-9)
        same = {name: each for name, each in reference["metrics"].items() if name not in OTHER_MEANS.get(loss, ())}
        assert {name: result["metrics"][name] for name in same} == pytest.approx(same, rel=1e-9)


@pytest.mark.parametrize(("loss", "reduction"), [(sum_over_samples, "sum"), (mean_over_targets, num_targets)])
def test_pipelines_side_by_side_count_by_weight(loss: Any, reduction: Any, world4: World) -> None:
    """Each has 4 of a global batch's 8 samples, with another number of targets."""
    reference = train(loss, 1)
    for result in world4.run(train, loss, 4, batch_size=4, loss_reduction=reduction, pipeline_parallel_size=2):
        assert_same_weights(result, reference, atol=1e-12)
        assert result["metrics"]["samples"] == reference["metrics"]["samples"]
        if loss is mean_over_targets:  # logged with the number of targets as its batch size
            assert result["metrics"]["by_target"] == pytest.approx(reference["metrics"]["by_target"], rel=1e-6)


def test_losses_that_do_not_add_up_are_refused(world2: World) -> None:
    start = r"the loss of a batch is [\d.]+ as a whole, and [\d.]+ in 2 micro-batches under loss_reduction='mean'"
    words = start + r" .*targets that are not ignored.* \| after the losses \[\]$"
    world2.run_raising(ValueError, words, train, mean_over_targets, num_micro_batches=2)
