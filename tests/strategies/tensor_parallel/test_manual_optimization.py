"""Modules that step their optimizers themselves train under tensor_split as on one device."""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F

from tests.strategies.tasks import Case, assert_same_weights, make_strategy, make_trainer, state, train_loader
from tests.world import World

KINDS = ("toggled", "accumulated and clipped", "closures", "weights clamped", "plain optimizers")


def layers(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, outputs))


class Opponents(L.LightningModule):
    """A generator and a critic, each with an optimizer and a scheduler of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization, self.kind = False, kind
        self.generator, self.critic = layers(6), layers(1)
        self.seen: list[float] = []
        self.split: list[str] = []

    def losses(self, x: Tensor, number: int) -> Tensor:
        made = self.generator(x)
        if number == 0:
            return F.softplus(self.critic(made)).mean() + F.softplus(-self.critic(x)).mean()
        return F.softplus(-self.critic(made)).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        optimizers: Any = self.optimizers(use_pl_optimizer=self.kind != "plain optimizers")
        for number, optimizer in enumerate(optimizers):
            if self.kind == "closures":
                optimizer.step(closure=functools.partial(self.closure, optimizer, x, number))
                continue
            if self.kind != "plain optimizers":
                self.toggle_optimizer(optimizer)
            scale = 0.5 if self.kind == "accumulated and clipped" else 1.0
            loss = self.losses(x, number) * scale
            self.manual_backward(loss)
            self.seen.append(float(loss.detach()))
            if scale == 1.0 or batch_idx % 2:
                self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
            if self.kind != "plain optimizers":
                self.untoggle_optimizer(optimizer)
            if self.kind == "weights clamped" and number == 0:
                for parameter in self.critic.parameters():
                    parameter.data.clamp_(-0.1, 0.1)
        for scheduler in self.lr_schedulers() if batch_idx % 2 else ():  # type: ignore[union-attr]
            scheduler.step()  # type: ignore[call-arg]

    def closure(self, optimizer: Any, x: Tensor, number: int) -> Tensor:
        optimizer.zero_grad()
        loss = self.losses(x, number)
        self.manual_backward(loss)
        self.seen.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(part.parameters(), lr=0.02) for part in (self.critic, self.generator)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]

    def on_train_start(self) -> None:
        if self.trainer.world_size > 1:
            self.trainer.strategy.on_split = lambda plan: self.split.extend(each.kind for each in plan.blocks)


def train(
    kind: str, ranks: int, precision: Any = "64-true", **strategy: Any
) -> tuple[dict[str, Any], list[float], int, list[str]]:
    module, options = Opponents(kind), dict[str, Any](use_distributed_sampler=bool(strategy))
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=2)
        options |= {"precision": None, "plugins": MixedPrecision("16-mixed", "cpu", scaler)}
    case = Case(max_epochs=1, num_samples=56, precision=precision, trainer=options)
    trainer = make_trainer(case, make_strategy("tensor_split", **strategy) if ranks > 1 else "auto", ranks)
    trainer.fit(module, train_loader(case, trainer))
    return {"weights": state(module)}, module.seen, trainer.global_step, module.split


@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_one_device_does(world2: World, kind: str) -> None:
    """Refused while splits were compared by the loss of a step; the trial of a split must not step, clamp or count."""
    weights, losses, steps, _ = train(kind, 1)
    for found, found_losses, found_steps, split in world2.run(train, kind, 2):
        assert split
        assert (found_losses, found_steps) == (pytest.approx(losses, rel=1e-9), steps)
        assert_same_weights(found, weights)


def test_a_scaler_skips_the_steps_that_one_device_skips(world2: World) -> None:
    weights, losses, steps, _ = train("toggled", 1, "16-mixed")
    for found, found_losses, found_steps, split in world2.run(train, "toggled", 2, "16-mixed"):
        assert split
        assert found_steps == steps
        assert found_losses == pytest.approx(losses, rel=1e-2)
        assert_same_weights(found, weights, rtol=0.05, atol=5e-3)


def test_groups_side_by_side_average_what_is_stepped_by_hand(world4: World) -> None:
    weights, *_ = train("accumulated and clipped", 1)
    options = {"data_parallel_size": 2, "find_unused_parameters": True}
    for found, *_, split in world4.run(functools.partial(train, **options), "accumulated and clipped", 4):
        assert split
        assert_same_weights(found, weights)
