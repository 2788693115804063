"""Layers of a pipeline that people write and that once crashed it, or trained wrongly without a word.

Each trains as on one device, or is refused before the first step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from lightning_multigpu import PipelineStrategy
from lightning_multigpu.engine.pipeline.splitting.chain import find_chain
from tests.strategies.pipeline.fitted import fitted
from tests.strategies.tasks import NUM_FEATURES, Case, assert_same_weights
from tests.world import World

WIDTH = NUM_FEATURES


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()  # type: ignore[no-any-return]


def blocks() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(4)))


class Task(L.LightningModule):
    """Runs the layers one after the other, by iterating over them."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = make()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return (self(x).sum(-1) - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Iterating(Task):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:  # type: ignore[attr-defined]
            x = layer(x)
        return x


class CallingForward(Task):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:  # type: ignore[attr-defined]
            x = layer.forward(x)
        return x


class CompiledStep(Task):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(make)
        self.run = torch.compile(lambda x: self.layers(x.sin()).cos(), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)  # type: ignore[no-any-return]


class Gate(nn.Module):
    """Its weights are used again on the result of their first use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.gate).tanh() * self.gate


class Reader(nn.Module):
    """Several of them share a memory."""

    def __init__(self, memory: nn.Linear) -> None:
        super().__init__()
        self.own, self.memory = nn.Linear(WIDTH, WIDTH), memory

    def forward(self, x: Tensor) -> Tensor:
        return x + self.memory(self.own(x).tanh())  # type: ignore[no-any-return]


class Again(Block):
    """Does not keep what is inside it for backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner = kind(2, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.view(-1, WIDTH // 2, 2))[0].flatten(1)  # type: ignore[no-any-return]


def readers() -> nn.ModuleList:
    memory = nn.Linear(WIDTH, WIDTH)
    return nn.ModuleList(Reader(memory) for _ in range(8))


def tied() -> nn.Sequential:
    layers = blocks()
    layers[3].linear.weight = layers[0].linear.weight  # type: ignore[union-attr,assignment]
    return layers


def hooked(register: str, hook: Callable[..., Any]) -> nn.Sequential:
    layers = blocks()
    for layer in layers:
        getattr(layer, register)(hook)
    return layers


def compiled(backend: str) -> nn.Sequential:
    layers = blocks()
    for layer in layers:
        layer.compile(backend=backend)
    return layers


def compiled_around() -> nn.Module:
    return torch.compile(blocks(), backend="eager")  # type: ignore[return-value]


def normalised() -> nn.Sequential:
    layers = blocks()
    for layer in layers:
        parametrizations.weight_norm(layer.linear)  # type: ignore[arg-type]
    return layers


MODULES: dict[str, Callable[[], Task]] = {
    "a parameter that is used twice": lambda: Task(lambda: nn.Sequential(*(Gate() for _ in range(4)))),
    "a memory that all layers share": lambda: Iterating(readers),
    "one layer four times": lambda: Iterating(lambda: nn.ModuleList([Block()] * 4)),
    "two layers with one weight": lambda: Task(tied),
    "compiled layers": lambda: Task(lambda: compiled("eager")),
    "layers compiled with their backward": lambda: Task(lambda: compiled("aot_eager")),
    "layers in a compiled container": lambda: Task(compiled_around),
    "layers in a compiled function": lambda: CompiledStep(blocks),
    "hooks behind layers": lambda: Task(lambda: hooked("register_forward_hook", lambda m, a, out: out + a[0])),
    "hooks in backward": lambda: Task(
        lambda: hooked(
            "register_full_backward_hook", lambda m, given, out: tuple(g if g is None else 2 * g for g in given)
        )
    ),
    "layers whose forward is called": lambda: CallingForward(blocks),
    "layers with weight norm": lambda: Task(normalised),
    "layers that are computed again": lambda: Task(lambda: nn.Sequential(*(Again() for _ in range(4)))),
    "recurrent layers": lambda: Task(
        lambda: nn.Sequential(*(Recurrent(k) for k in (nn.LSTM, nn.GRU, nn.RNN, nn.LSTM)))
    ),
}


def train(make: Callable[[], Task], ranks: int = 1, **options: Any) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = fitted(make, ranks, case=Case(max_epochs=1, num_samples=24), **options)
    return {**result, "said": " ".join(str(warning.message) for warning in said)}


def train_named(name: str, ranks: int = 1, **options: Any) -> dict[str, Any]:
    return train(MODULES[name], ranks, **options)


on_one_device = cache(train_named)
COUPLED = {"a parameter that is used twice", "a memory that all layers share", "recurrent layers"}
COMPILED = "layers compiled with their backward"


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("name", MODULES)
def test_a_stranger_layer_trains_as_on_one_device(name: str, schedule: str, world2: World) -> None:
    """Several of them crashed, and hooks were left out.

    Under zero_bubble the second batch raised "Trying to backward through the graph a second time" where a parameter is
    used twice. A layer that stands in its container twice raised KeyError, and a compiled one RecursionError.
    """
    reference = on_one_device(name)
    for result in world2.run(train_named, name, 2, num_micro_batches=4, schedule=schedule):
        assert_same_weights(result, reference)
        is_uncompiled = "run uncompiled; compile each layer by itself" in result["said"]
        assert is_uncompiled == (name == "layers in a compiled container")
        together = "computes the gradients of its inputs and of its weights together" in result["said"]
        assert together == (schedule == "zero_bubble" and name in {*COUPLED, COMPILED})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.second = Recurrent(nn.LSTM), nn.Linear(WIDTH, WIDTH), Recurrent(nn.GRU)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)) + x)  # type: ignore[no-any-return]


def test_recurrent_layers_behind_split_points(world2: World) -> None:
    """They keep weak references to their parameters, which could not move to their stage because of that."""
    module = partial(Task, Net)
    reference = train(module)
    for result in world2.run(train, module, 2, num_micro_batches=4, split_points=["layers.between"]):
        assert_same_weights(result, reference)


def test_one_layer_twelve_times_is_split_in_halves() -> None:
    """It counted once, so that one stage had one layer and the other had eleven."""
    chain = find_chain(Iterating(lambda: nn.ModuleList([Block()] * 12)), "layers", 2)
    assert PipelineStrategy().pipeline_options.bounds(chain, 2) == [(0, 6), (6, 12)]
