"""Layers that once crashed a pipeline, or trained wrongly without a word, train as on one device."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from lightning_multigpu import PipelineStrategy
from lightning_multigpu.engine.pipeline.splitting.chain import find_chain
from tests.strategies.pipeline.fitted import assert_fits_alike, fitted
from tests.strategies.pipeline.test_kept_state import Plain
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


class Task(Plain):
    def __init__(self, make: Callable[[], nn.Module], way: str = "called") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = make()
        self.way = way
        self.compiled = torch.compile(lambda x: self.layers(x.sin()).cos(), backend="eager")

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.way != "one by one":
            return cross_entropy(self.compiled(x) if self.way == "compiled" else self.layers(x), y)
        for layer in self.layers:
            x = layer.forward(x)
        return cross_entropy(x, y)


class Gate(nn.Module):
    """Its weights are used again on the result of their first use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.gate).tanh() * self.gate


class Reader(nn.Module):
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


def readers() -> nn.Sequential:
    memory = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(*(Reader(memory) for _ in range(8)))


def tied() -> nn.Sequential:
    layers = blocks()
    layers[3].linear.weight = layers[0].linear.weight  # type: ignore[union-attr,assignment]
    return layers


def blocks_with(change: Callable[[Any], object]) -> nn.Sequential:
    layers = blocks()
    for layer in layers:
        change(layer)
    return layers


def twice(layer: nn.Module, given: Any, out: Any) -> Any:
    return tuple(gradient if gradient is None else 2 * gradient for gradient in given)


MODULES: dict[str, Callable[[], Task]] = {
    "a parameter that is used twice": lambda: Task(lambda: nn.Sequential(*(Gate() for _ in range(4)))),
    "a memory that all layers share": lambda: Task(readers),
    "one layer four times": lambda: Task(lambda: nn.Sequential(*[Block()] * 4)),
    "two layers with one weight": lambda: Task(tied),
    "compiled layers": lambda: Task(lambda: blocks_with(lambda layer: layer.compile(backend="eager"))),
    "layers compiled with their backward": lambda: Task(lambda: blocks_with(lambda b: b.compile(backend="aot_eager"))),
    "layers in a compiled container": lambda: Task(lambda: torch.compile(blocks(), backend="eager")),  # type: ignore[arg-type,return-value]
    "layers in a compiled function": lambda: Task(blocks, "compiled"),
    "hooks behind layers": lambda: Task(
        lambda: blocks_with(lambda layer: layer.register_forward_hook(lambda m, given, out: out + given[0]))
    ),
    "hooks in backward": lambda: Task(lambda: blocks_with(lambda layer: layer.register_full_backward_hook(twice))),
    "layers whose forward is called": lambda: Task(blocks, "one by one"),
    "layers with weight norm": lambda: Task(lambda: blocks_with(lambda b: parametrizations.weight_norm(b.linear))),
    "layers that are computed again": lambda: Task(lambda: nn.Sequential(*(Again() for _ in range(4)))),
    "recurrent layers": lambda: Task(
        lambda: nn.Sequential(*(Recurrent(k) for k in (nn.LSTM, nn.GRU, nn.RNN, nn.LSTM)))
    ),
}
SCHEDULES = "1f1b", "zero_bubble"


def train(name: str) -> list[dict[str, Any]]:
    results = []
    for schedule in SCHEDULES:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            result = fitted(MODULES[name], case=CASE, num_micro_batches=4, schedule=schedule)
        results.append({**result, "said": " ".join(str(warning.message) for warning in said)})
    return results


CASE = Case(max_epochs=1, num_samples=24)
TOGETHER = (
    "a parameter that is used twice",
    "a memory that all layers share",
    "recurrent layers",
    "layers compiled with their backward",
)


@pytest.mark.parametrize("name", MODULES)
def test_a_stranger_layer_trains_as_on_one_device(name: str, world2: World) -> None:
    """Several of them crashed, and hooks were left out.

    Under zero_bubble the second batch raised "Trying to backward through the graph a second time" where a parameter is
    used twice. A layer that stands in its container twice raised KeyError, and a compiled one RecursionError.
    """
    with warnings.catch_warnings(action="ignore"):
        reference = fitted(MODULES[name], 1, case=CASE)
    for of_rank in world2.run(train, name):
        for schedule, result in zip(SCHEDULES, of_rank, strict=True):
            assert_same_weights(result, reference)
            is_uncompiled = "run uncompiled; compile each layer by itself" in result["said"]
            assert is_uncompiled == (name == "layers in a compiled container")
            together = "computes the gradients of its inputs and of its weights together" in result["said"]
            assert together == (schedule == "zero_bubble" and name in TOGETHER)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.second = Recurrent(nn.LSTM), nn.Linear(WIDTH, WIDTH), Recurrent(nn.GRU)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)) + x)  # type: ignore[no-any-return]


def test_recurrent_layers_behind_split_points(world2: World) -> None:
    """They keep weak references to their parameters, which could not move to their stage because of that."""
    options: dict[str, Any] = {"num_micro_batches": 4, "split_points": ["layers.between"]}
    assert_fits_alike(world2, partial(Task, Net), case=CASE, **options)


def test_one_layer_twelve_times_is_split_in_halves() -> None:
    """It counted once, so that one stage had one layer and the other had eleven."""
    chain = find_chain(Task(lambda: nn.Sequential(*[Block()] * 12)), "layers", 2)
    assert PipelineStrategy().pipeline_options.bounds(chain, 2) == [(0, 6), (6, 12)]
