"""``activation_checkpointing`` of strategies whose ranks run the whole module; pipelines have tests of their own."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_multigpu import RingDDPStrategy
from tests.strategies.tasks import (
    NUM_CLASSES,
    NUM_FEATURES,
    Case,
    Classifier,
    assert_same_weights,
    dataset,
    fit_module,
    make_strategy,
    make_trainer,
    state,
    train_loader,
)
from tests.world import World

WIDTH = 8


class Block(nn.Module):
    """Draws what it is told to; else torch's and Python's random numbers, and counts batches in BatchNorm."""

    def __init__(self, draw: Callable[[], Any] | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout, self.norm, self.draw = nn.Dropout(0.3), nn.BatchNorm1d(WIDTH), draw

    def forward(self, x: Tensor) -> Tensor:
        if self.draw is not None:
            self.draw()
            return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]
        scale = 0.5 if self.training and random.random() < 0.5 else 1.0
        return self.norm(x + scale * self.down(self.dropout(torch.tanh(self.up(x)))))  # type: ignore[no-any-return]


class Blocks(L.LightningModule):
    """Notes the bytes that autograd keeps of each step."""

    def __init__(self, draw: Callable[[], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(NUM_FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block(draw) for _ in range(4))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        self.kept: list[int] = []

    def keep(self, tensor: Tensor) -> Tensor:
        self.kept[-1] += tensor.nbytes
        return tensor

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor):
            x = self.first(batch[0])
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(x), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(name: str, choice: Any) -> dict[str, Any]:
    module = Blocks()
    case = Case(max_epochs=2, trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5})
    fit_module(module, make_strategy(name, activation_checkpointing=choice), 2, case)
    return {"weights": state(module), "kept": module.kept[-1]}


@pytest.mark.parametrize("name", ["ring_ddp", "ddp_sharded"])  # whose steps run in blocks of their own
def test_trains_as_without_and_keeps_less(name: str, world2: World) -> None:
    """Dropout draws the same numbers again, and goes on behind backward as without."""
    plain, again = world2.run(train, name, False), world2.run(train, name, True)
    for result, reference in zip(again, plain, strict=True):
        assert_same_weights(result, reference)
        assert result["kept"] < 0.5 * reference["kept"]


def replicated(choice: Any, devices: int, draw: Callable[[], Any] = int) -> dict[str, Any]:
    module, case = Blocks(draw), Case(max_epochs=2, num_samples=52)  # the last batch is one of four samples
    strategy = make_strategy("dp", activation_checkpointing=choice) if devices > 1 else "auto"
    trainer = make_trainer(case, strategy, devices)
    trainer.fit(module, train_loader(case, 1))
    return {"weights": state(module), "kept": max(module.kept)}


def test_replicas_of_dp_train_as_one_device_and_keep_less() -> None:
    plain, again = replicated(False, 2), replicated(True, 2)
    assert_same_weights(again, replicated(False, 1))
    assert again["kept"] < 0.5 * plain["kept"]


@pytest.mark.parametrize("draw", [partial(torch.rand, 1), random.random, numpy.random.standard_normal])
def test_replicas_of_dp_may_not_draw_from_a_generator_that_they_share(draw: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"activation_checkpointing, and the step draws random numbers"):
        replicated(True, 2, draw)


class Late(Classifier):
    def configure_model(self) -> None:
        pass


def fit_naming_conv(module: L.LightningModule) -> None:
    trainer = make_trainer(Case(), RingDDPStrategy(activation_checkpointing=["Conv2d"]), 2)
    trainer.fit(module, DataLoader(dataset(8)))


def test_what_does_not_exist_is_named_before_any_process_starts() -> None:
    with pytest.raises(ValueError, match=r"\['Conv2d'\] names no layer of Classifier.*Linear.*'layers.0'"):
        fit_naming_conv(Classifier())
    for choice in ("Block", [1]):
        with pytest.raises(ValueError, match=r"is neither a bool nor a list of classes"):
            RingDDPStrategy(activation_checkpointing=choice)
    compiled = torch.compile(Classifier(), backend="eager")
    with pytest.raises(ValueError, match=r"Classifier is compiled as a whole.*layer.compile\(\)"):
        make_trainer(Case(), RingDDPStrategy(activation_checkpointing=True), 2).fit(compiled, DataLoader(dataset(8)))


def test_layers_that_are_made_later_are_named_then(world2: World) -> None:
    world2.run_raising(ValueError, r"\['Conv2d'\] names no layer of Late", lambda: fit_naming_conv(Late()))
