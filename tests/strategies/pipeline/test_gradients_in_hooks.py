"""Hooks that clip or log by the norms of all gradients do on every stage what they do on one device."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
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
    make_strategy,
    make_trainer,
    state,
    train_loader,
)
from tests.world import World


class Clipping(Classifier):
    """Clips by hand, and logs norms before and after."""

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


class ByConfiguration(Classifier):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3)


class ByHand(Classifier):
    """Calls the closure itself, clips, and steps without it."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3)
        optimizer.step()


class ClipEach(L.Callback):
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        for gradient in gradients(pl_module):
            gradient.mul_(0.1 / gradient.norm())


def gradients(module: L.LightningModule) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def train(module: type[Classifier], strategy: Any, ranks: int, trainer_options: dict[str, Any]) -> dict[str, Any]:
    made = module()
    case = Case(trainer=trainer_options)
    trainer = make_trainer(case, strategy, ranks)
    trainer.fit(made, train_loader(case, trainer))
    kept = [entry for each in trainer.optimizers for entry in each.state]
    return {
        "weights": state(made),
        "norms": getattr(made, "norms", []),
        "after backward": getattr(made, "after_backward", []),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "left": [p.grad is not None and isinstance(p.grad, Placeholder) for p in made.parameters()],
        "states of stand-ins": any(isinstance(entry, Placeholder) for entry in kept),
    }


@pytest.mark.parametrize(
    ("module", "schedule", "options"),
    [
        (Clipping, "1f1b", {}),
        (Clipping, "zero_bubble", {}),
        (Clipping, "1f1b", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        (ByConfiguration, "1f1b", {}),
        (ByHand, "1f1b", {"accumulate_grad_batches": 2}),
        (Classifier, "1f1b", {"callbacks": [ClipEach()]}),
    ],
    ids=["by hand", "zero-bubble", "and by the Trainer", "configured", "in optimizer_step", "by a callback"],
)
def test_trains_as_on_one_device(
    module: type[Classifier], schedule: Any, options: dict[str, Any], world2: World
) -> None:
    expected = train(module, "auto", 1, options)
    accumulates = "accumulate_grad_batches" in options
    for found in world2.run(train, module, PipelineStrategy(schedule=schedule), 2, options):
        assert_same_weights(found, expected)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        assert accumulates or found["after backward"] == pytest.approx(expected["after backward"], rel=1e-9)
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
        assert not any(found["left"])
        assert not found["states of stand-ins"]


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
        if batch_idx != 6:  # the last of an epoch: validation follows
            optimizer.step()


def read(strategy: Any, ranks: int) -> dict[str, Any]:
    made, case = Centring(), Case(trainer={"gradient_clip_val": 0.2}, max_epochs=2)
    trainer = make_trainer(case, strategy, ranks)
    trainer.fit(made, train_loader(case, trainer), eval_loader(16, batch_size=8 // data_ranks(trainer)))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"weights": state(made), "metrics": metrics, "read": made.read, "norms": made.norms}


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2)], ids=str)
def test_gradients_of_split_layers_are_whole(shape: tuple[int, int, int], world4: World) -> None:
    sizes = dict(zip(("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size"), shape, strict=True))
    expected = read("auto", 1)
    for found in world4.run(read, make_strategy("hybrid", **sizes), 4):
        assert_same_weights(found, expected)
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        for mine, theirs in zip(found["read"], expected["read"], strict=True):
            assert mine[:3] == theirs[:3]
            assert not mine[3] or mine[3] == pytest.approx(theirs[3], rel=1e-9)


def scaled(strategy: Any, ranks: int) -> list[float]:
    module = Clipping()
    case = Case(precision="32-true", trainer={"plugins": MixedPrecision("16-mixed", "cpu"), "precision": None})
    trainer = make_trainer(case, strategy, ranks)
    trainer.fit(module, train_loader(case, trainer))
    return module.norms


def test_norms_are_those_of_unscaled_gradients(world2: World) -> None:
    expected = scaled("auto", 1)
    for found in world2.run(scaled, PipelineStrategy(balance=[1, 7]), 2):
        assert found == pytest.approx(expected, rel=0.05), "in half precision"


class Careful(Classifier):
    """Skips a step whose gradients are not finite, here by a batch that makes those of the last layers infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.second.bias.sum() * float("inf") if batch_idx == 3 else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if not all(torch.isfinite(gradient).all() for gradient in gradients(self)):
            self.noted.append(self.trainer.global_step)
            optimizer.zero_grad()


class Drawing(Classifier):
    """Looks at the gradients that are here."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        self.noted = [n for n, p in self.named_parameters() if strategy.holds(p) and len(p.grad.numpy())]


def test_all_stages_skip_a_step_that_one_of_them_would(world2: World) -> None:
    expected = fitted(Careful, 1)
    for found in world2.run(fitted, Careful, balance=[2, 6], num_micro_batches=1):
        assert found["noted"] == expected["noted"] == [3]
        assert_same_weights(found, expected)


def test_a_hook_can_ask_what_is_here(world2: World) -> None:
    last, first = (result["noted"] for result in world2.run(fitted, Drawing, balance=[2, 6]))
    assert (last, first) == (["layers.2.weight", "layers.2.bias"], ["layers.0.weight", "layers.0.bias"])


class Averaging(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("mean", float(torch.stack([gradient.abs().mean() for gradient in gradients(self)]).mean()))


def test_what_is_not_known_is_refused(world2: World) -> None:
    words = r"the gradient of parameter layers.*strategy\.holds\(parameter\)"
    world2.run_raising(PipelineError, words, fitted, Averaging)


class ClippingAdam(torch.optim.AdamW):
    """Clips by the norm of what it holds: on a stage, of that stage's gradients."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.3)
        super().step()
        return loss


class Unprobed(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["params"][0].numel() < 10:
            raise RuntimeError("too small")
        return super().step(closure)


class WithClippingAdam(Classifier):
    kind: Any = ClippingAdam

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.1)


class WithUnprobed(WithClippingAdam):
    kind = Unprobed


class WithHook(WithClippingAdam):
    kind = torch.optim.SGD

    def configure_optimizers(self) -> Any:
        self.first.weight.register_post_accumulate_grad_hook(lambda p: p.data.sub_(p.grad))
        return super().configure_optimizers()


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (WithClippingAdam, r"ClippingAdam works on all parameters at once.*gradient_clip_val"),
        (WithHook, r"such a hook runs after each micro-batch"),
    ],
)
def test_optimizers_that_need_all_gradients_are_refused(module: Any, words: str, world2: World) -> None:
    """Each stage stepped by the norm of its own gradients, and the run ended as if nothing were wrong."""
    world2.run_raising(ValueError, words, fitted, module)


def warned() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted(WithUnprobed)
    return [str(each.message) for each in caught if "parameter by parameter" in str(each.message)]


def test_optimizers_that_cannot_be_checked_warn(world2: World) -> None:
    assert "Unprobed works parameter by parameter could not be checked: RuntimeError" in world2.run(warned)[0][0]
