"""Modules written by strangers: what a pipeline cannot do is refused with the fix, and the fix trains."""

import copy
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.micro_batches import split_batch
from tests.strategies.pipeline.fitted import assert_fits_alike, fitted
from tests.strategies.pipeline.test_kept_state import Plain
from tests.strategies.tasks import Case
from tests.world import World

CASE = Case(max_epochs=1, num_samples=20)


class Checkpointed(Plain):
    """Does not keep the activations of the first layers, in the way of older code."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.layers[3](checkpoint(self.layers[:3], x.requires_grad_(), use_reentrant=True)), y)


class Penalised(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        logits = self.layers(x)
        (gradient,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        return cross_entropy(logits, batch[1]) + gradient.square().mean()


class PenalisedBehind(Plain):
    """A penalty on the gradients of what comes behind the layers, which the last stage computes alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.layers(batch[0])
        (gradient,) = torch.autograd.grad(logits.softmax(-1).square().sum(), logits, create_graph=True)
        return cross_entropy(logits, batch[1]) + gradient.square().mean()


class Learns(Plain):
    """MAML; ``allow_unused`` gave None for the parameters of other stages."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        gradients = torch.autograd.grad(loss, list(self.parameters()), create_graph=True, allow_unused=True)
        return loss + sum(gradient.square().sum() for gradient in gradients if gradient is not None)


class BackwardTwice(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        if loss.requires_grad:
            (0.1 * loss).backward(retain_graph=True)
        return loss


class SkipsLayers(Plain):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return x.square().mean()


@dataclass
class Hidden:
    x: Tensor


class HiddenLayer(nn.Linear):
    def forward(self, hidden: Hidden) -> Hidden:  # type: ignore[override]
        return Hidden(super().forward(hidden.x))


class HandsOnHidden(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(HiddenLayer(6, 6) for _ in range(4)))
        self.head = nn.Linear(6, 3)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.head(self.layers(Hidden(x)).x), y)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        # The first stage's layers ran without gradients: its weights were wrong by 0.2.
        (
            Checkpointed,
            {"num_micro_batches": 1, "balance": [3, 1]},
            r"layers.0 is called within torch.utils.checkpoint.*=True",
        ),
        # The answer was torch's: a tensor is not used in the graph.
        (Penalised, {}, "cannot differentiate across stages within a step"),
        (Learns, {"verify_steps": 0}, "with respect to parameter layers.0.weight.*cannot differentiate across stages"),
        # Gradients of the last stage alone were added.
        (BackwardTwice, {"num_micro_batches": 1}, "leave backward to Lightning"),
        (SkipsLayers, {"verify_steps": 0}, "returned without running the split part"),
        (SkipsLayers, {"verify_steps": 0, "balance": "time"}, "returned without running the split part"),
        # The answer was about a residual.
        (HandsOnHidden, {}, r"layer layers.0 returns Hidden, in which a pipeline finds no tensors"),
    ],
)
def test_what_stages_cannot_do_is_said(kind: type[Plain], options: dict[str, Any], words: str, world2: World) -> None:
    world2.run_raising(PipelineError, words, fitted, kind, case=CASE, **options)


class Codes(nn.Linear):
    """A layer with frozen codes of a dtype, as of a quantised one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(6, 6)
        self.codes = nn.Parameter(torch.ones(6).to(dtype), requires_grad=False)
        self.register_buffer("zero", torch.ones(6).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x * self.codes.to(x) * self.zero.to(x)))  # type: ignore[operator]


class Quantised(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*map(Codes, (torch.int64, torch.int16, torch.bool)))
        self.codes = nn.Parameter(torch.arange(6), requires_grad=False)
        self.scales = nn.Parameter(torch.ones(6).to(torch.float8_e4m3fn), requires_grad=False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.layers(x * self.codes) * self.scales.to(x), y)


class Halved(Plain):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: 0.5 * gradient)


class LeavesOut(Plain):
    """A loss of the first layers, then one of no parameter, and one of the head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.layers(batch[0])
        if batch_idx == 1:
            return torch.zeros((), dtype=logits.dtype, requires_grad=True)
        return cross_entropy(self.head(logits.detach() if batch_idx == 2 else logits), batch[1])


@pytest.mark.parametrize(
    ("kind", "schedule", "accumulate"),
    [
        (PenalisedBehind, "1f1b", 1),
        (Quantised, "1f1b", 1),
        (Halved, "1f1b", 1),
        (LeavesOut, "1f1b", 1),
        (LeavesOut, "1f1b", 2),
        (LeavesOut, "zero_bubble", 1),
    ],
)
def test_what_stages_can_do(kind: type[Plain], schedule: str, accumulate: int, world2: World) -> None:
    """It failed, or moved weights.

    Gradients of parameters with hooks differed in the proof, whose copy had none. Frozen integers failed in its norms,
    int16 and float8 in Gloo's broadcast of the first values. Where a loss left stages out, those before the last one
    stepped with gradients of zero, and momentum moved their weights.
    """
    case = Case(max_epochs=1, num_samples=32, trainer={"accumulate_grad_batches": accumulate})
    assert_fits_alike(world2, kind, case=case, schedule=schedule)
    assert "not proved" not in world2.output(0)


class TiedLate(Plain):
    def on_fit_start(self) -> None:
        self.layers[3].bias = self.layers[2].bias = self.layers[0].bias


def test_parameters_that_are_tied_after_the_split_are_refused(world2: World) -> None:
    """It was a KeyError, or a layer's weight was said to be its input."""
    words = r"^layers.2.bias is another parameter than when the model was split.*setup or configure_model"
    world2.run_raising(ValueError, words, fitted, TiedLate, case=CASE)


class KeepsCopies(L.Callback):
    """Averages of weights, as users write them: kept by the callback or by the module."""

    def __init__(self, owner: str) -> None:
        self.owner = owner

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.owner == "KeepsCopies":
            self.average = {name: value.detach().clone() for name, value in pl_module.named_parameters()}
        else:
            pl_module.average = copy.deepcopy(pl_module.layers)


def test_copies_of_weights_are_refused_before_they_are_averaged(world2: World) -> None:
    """A run with them failed after the whole training."""
    for owner in ("KeepsCopies", "Plain"):
        words = rf"{owner} keeps a copy of parameter layers.\d.weight, .* use ring_ddp"
        world2.run_raising(ValueError, words, fitted, Plain, callbacks=[KeepsCopies(owner)])


class Mean(nn.Module):
    def forward(self, states: tuple[Tensor, Tensor]) -> Tensor:
        return states[0].mean(0)


class TimeFirst(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.GRU(8, 8), Mean(), nn.Linear(8, 3))


def time_first(samples: list[Any]) -> Any:
    """Shapes (time, samples, features) and (samples,); the time is as long as the batch is large."""
    x, y = (torch.stack(entries) for entries in zip(*samples, strict=True))
    return torch.stack([x * (0.5 + step) for step in range(len(x))]), y


def weight(batch: Any) -> float:
    x, y = batch
    assert x.shape[1] == len(y)
    return float(len(y))


def test_time_first_batches_are_cut_along_their_samples(world2: World) -> None:
    """They were cut along time, which nothing noticed where a batch had as many samples as steps."""
    options: dict[str, Any] = {"case": CASE, "collate_fn": time_first, "num_micro_batches": 3, "batch_dim": 1}
    assert_fits_alike(world2, TimeFirst, **options, loss_reduction=weight)


def test_a_list_of_samples_is_not_cut_along_their_features() -> None:
    x, y = torch.zeros(4, 2), torch.zeros(4)
    for sample in ((x[0], y[0]), (x[0], 0), {"x": x[:3], "y": y[:2]}):
        with pytest.raises(ValueError, match=r"the batch is a list of 4 samples .*stack them in collate_fn"):
            split_batch([sample] * 4, 2)
    for batch in ([x, y], [[x, y], [x, y]], [{"x": x}, {"y": y}], [[x, y], x]):  # which collate functions make
        assert len(split_batch(batch, 2)) == 2
