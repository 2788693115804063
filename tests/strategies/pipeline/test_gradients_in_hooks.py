"""Hooks that clip or log by the norms of all gradients do on every stage what they do on one device."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from lightning_multigpu import PipelineStrategy
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.placeholder import Placeholder
from tests.strategies.pipeline.fitted import fitted
from tests.strategies.tasks import (
    Case,
    Classifier,
    assert_same_weights,
    data_ranks,
    eval_loader,
    fit_module,
    make_strategy,
    state,
)
from tests.world import World


class Clipping(Classifier):
    def __init__(self) -> None:
        super().__init__("adamw")
        self.norms: list[float] = []
        self.after_backward: list[float] = []

    def on_after_backward(self) -> None:
        self.after_backward.append(float(torch.nn.utils.get_total_norm(gradients(self), float("inf"))))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))
        self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3)))
        self.log("clipped", torch.nn.utils.get_total_norm(gradients(self)))


class ByHand(Classifier):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3)
        optimizer.step()


def gradients(module: L.LightningModule) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def clip_each(_: Any, module: L.LightningModule, optimizer: Any) -> None:
    for gradient in gradients(module):
        gradient.mul_(0.1 / gradient.norm())


def train(module: type[Classifier], strategy: Any, ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    made = module()
    trainer = fit_module(made, strategy, ranks, Case(max_epochs=1, num_samples=21, trainer=options))
    kept = [entry for each in trainer.optimizers for entry in each.state]
    return {
        "weights": state(made),
        "norms": getattr(made, "norms", []),
        "after backward": getattr(made, "after_backward", []),
        "read": getattr(made, "read", []),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "left": [p.grad is not None and isinstance(p.grad, Placeholder) for p in made.parameters()],
        "states of stand-ins": any(isinstance(entry, Placeholder) for entry in kept),
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_same_weights(found, expected)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-9)
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
    assert not any(found["left"])
    assert not found["states of stand-ins"]


@pytest.mark.parametrize(
    ("module", "schedule", "options"),
    [
        (Clipping, "zero_bubble", {}),
        (Clipping, "1f1b", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        (ByHand, "1f1b", {"accumulate_grad_batches": 2}),
        (Classifier, "1f1b", {"callbacks": [LambdaCallback(on_before_optimizer_step=clip_each)]}),
    ],
    ids=["by hand", "and by the Trainer", "in optimizer_step", "by a callback"],
)
def test_trains_as_on_one_device(
    module: type[Classifier], schedule: Any, options: dict[str, Any], world2: World
) -> None:
    expected = train(module, None, 1, options)
    for found in world2.run(train, module, PipelineStrategy(schedule=schedule), 2, options):
        assert_same(found, expected)
        if "accumulate_grad_batches" not in options:
            assert found["after backward"] == pytest.approx(expected["after backward"], rel=1e-9)


class Centring(Clipping):
    """Also centres gradients, in the hook and in its optimizer_step, which leaves out a step; notes sizes and means."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Any] = []

    def centre(self) -> None:
        strategy: Any = self.trainer.strategy
        for parameter in self.parameters():
            assert parameter.grad is not None
            assert torch.isfinite(parameter.grad).all()
            parameter.grad.sub_(parameter.grad.mean(dim=0, keepdim=True))
            is_here = self.trainer.world_size == 1 or strategy.holds(parameter)
            values = [float(each.detach().abs().mean()) for each in (parameter, parameter.grad)] if is_here else []
            self.read.append((tuple(parameter.shape), tuple(parameter.grad.shape), parameter.numel(), values))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.centre()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        self.centre()
        if batch_idx != 2:  # the last of an epoch: validation follows
            optimizer.step()

    def val_dataloader(self) -> Any:
        return eval_loader(16, batch_size=8 // data_ranks(self.trainer))


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2)], ids=str)
def test_gradients_of_split_layers_are_whole(shape: tuple[int, int, int], world4: World) -> None:
    sizes = dict(zip(("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size"), shape, strict=True))
    options = {"gradient_clip_val": 0.2, "max_epochs": 2}
    expected = train(Centring, None, 1, options)
    for found in world4.run(train, Centring, make_strategy("hybrid", **sizes), 4, options):
        assert_same(found, expected)
        for mine, theirs in zip(found["read"], expected["read"], strict=True):
            assert mine[:3] == theirs[:3]
            assert not mine[3] or mine[3] == pytest.approx(theirs[3], rel=1e-9)


class Averaging(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("mean", float(torch.stack([gradient.abs().mean() for gradient in gradients(self)]).mean()))


def test_what_is_not_known_is_refused(world2: World) -> None:
    words = r"the gradient of parameter layers.*strategy\.holds\(parameter\)"
    world2.run_raising(PipelineError, words, fitted, Averaging)
