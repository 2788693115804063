"""Splits by measured time and memory: the cuts are where they should be, and nobody notices that it was measured."""

import random
import time
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_multigpu import PipelineStrategy
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.optimizer_state import held_states
from lightning_multigpu.engine.placeholder import Placeholder
from tests.strategies.pipeline.fitted import fitted
from tests.strategies.pipeline.test_pipeline import SEED, WIDTH, Block, ByHand, TinyGPT, assert_same, train
from tests.strategies.tasks import Case, Classifier, assert_same_weights, fit_module, make_trainer, state, train_loader
from tests.world import World


class SlowBlock(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        time.sleep(0.004)
        return super().forward(x, mask)


class WideBlock(Block):
    """Most parameters, and hardly any time."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(WIDTH, 500), nn.ReLU(inplace=True), nn.Linear(500, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x + self.wide(x), mask)


def uneven(base: type[TinyGPT]) -> Any:
    """Two slow blocks, then quick ones, of which one has most of the parameters."""

    class Uneven(base):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(6)
            self.blocks = nn.ModuleList([SlowBlock(), SlowBlock(), Block(), WideBlock(), Block(), Block()])
            self.held: list[list[int]] = []
            self.states: list[Any] = []

        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            weights = [block.norm.weight for block in self.blocks]
            self.held.append([i for i, weight in enumerate(weights) if not isinstance(weight, Placeholder)])
            self.states.append((random.random(), float(np.random.rand()), float(torch.rand(()))))

    return Uneven()


def train_seeded(module: Any, strategy: Any, ranks: int) -> dict[str, Any]:
    random.seed(SEED)
    np.random.seed(SEED)
    result = train(module, strategy, ranks, max_epochs=1)
    return {**result, "num_noises": len(module.noises), "held": module.held, "states": module.states}


def pipeline(ranks: int, **options: Any) -> dict[str, Any]:
    return train_seeded(uneven(TinyGPT), PipelineStrategy(num_micro_batches=4, **options), ranks)


@pytest.fixture(scope="module")
def by_hand() -> dict[str, Any]:
    return train_seeded(uneven(ByHand), "auto", 1)


@pytest.fixture(scope="module")
def by_parameters(ranks2: World) -> list[dict[str, Any]]:
    return ranks2.run(pipeline, 2, schedule="gpipe")


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_trains_as_on_one_device(
    schedule: str, by_hand: dict[str, Any], by_parameters: list[dict[str, Any]], world2: World
) -> None:
    results = world2.run(pipeline, 2, schedule=schedule, balance="time")
    assert_same(results, by_hand)
    last, first = (result["held"] for result in results)
    for result, usual in zip(results, by_parameters, strict=True):
        assert result["states"] == usual["states"], "measuring has drawn random numbers"
        if schedule == "1f1b":
            assert result["num_noises"] == usual["num_noises"], "what the module notes of a measurement is taken back"
    if schedule == "1f1b":
        # The slow blocks are apart from the first step on, and the second is with the quick ones.
        assert [usual["held"] for usual in by_parameters] == [[[3, 4, 5]] * 4, [[0, 1, 2]] * 4]
        assert (first, last) == ([[0]] * 4, [[1, 2, 3, 4, 5]] * 4)
    else:
        assert len({0, 1} & set(first[0])) == 1, "each rank has one of the slow blocks"
    assert world2.output(0).count("by balance='parameters' it would be:") == 1, "measured once, and printed"


SHORT = Case(max_epochs=2, num_samples=16)


class Resumable(Classifier):
    """Slow where it has few parameters."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        torch.manual_seed(3)
        for name in ("5", "6"):
            self.layers._modules[name] = nn.Linear(3, 3)
            self.layers._modules[name].register_forward_pre_hook(pause)  # type: ignore[union-attr]
        self.noted: set[str] = set()

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        state = held_states(self.trainer.optimizers[0])
        self.noted = {name for name, p in self.named_parameters() if state.get(p)}


def pause(*_: Any) -> None:
    time.sleep(0.003)


def resume() -> dict[str, Any]:
    first = fit_module(Resumable("adamw"), PipelineStrategy(schedule="gpipe"), 2, SHORT, max_epochs=1)
    first.save_checkpoint("half.ckpt")
    resumed = Resumable("adamw")
    strategy = PipelineStrategy(schedule="gpipe", balance="time")
    again = fit_module(resumed, strategy, 2, SHORT, ckpt_path="half.ckpt")
    again.strategy.barrier()
    again.strategy.remove_checkpoint("half.ckpt")
    return {"weights": state(resumed), "noted": resumed.noted}


def test_optimizer_states_move_with_their_layers(world2: World) -> None:
    reference = fitted(partial(Resumable, "adamw"), 1, case=SHORT)
    results = world2.run(resume)
    for result in results:
        assert_same_weights(result, reference)
    last, first = (result["noted"] for result in results)
    assert first | last == reference["noted"]
    assert first & last == set()
    assert "layers.6.weight" in last
    assert "layers.5.weight" in first, "by parameters it would be on the last stage"


class Recomputed(nn.Linear):
    """Its activations are computed again in backward, in the way that forbids torch.autograd.grad."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)  # type: ignore[no-any-return,misc]


class Delicate(Classifier):
    """Whatever a measurement could spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.BatchNorm1d(6)
        layers = {"1": nn.ReLU(inplace=True), "3": nn.BatchNorm1d(3), "5": Recomputed(3, 3), "6": nn.ReLU(inplace=True)}
        for index, layer in layers.items():
            self.layers._modules[index] = layer
        self.first.requires_grad_(False)
        self.noted: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.before(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.noted.append(batch_idx)
        loss = super().training_step(batch, batch_idx)
        if len(self.noted) == 4:  # in the second batch; a measurement runs the step that often, too
            self.trainer.should_stop = True
        return loss.relu_()


def test_measuring_leaves_no_trace(world2: World) -> None:
    balances = "parameters", "memory"
    found = (world2.run(fitted, Delicate, num_micro_batches=2, balance=balance) for balance in balances)
    for before, after in zip(*found, strict=True):
        assert after["steps"] == before["steps"] == 2
        for norm in ("before", "layers.3"):  # the one on every stage, which runs for each; the other on one
            assert after["weights"][f"{norm}.num_batches_tracked"] == 2 * after["steps"], "once a micro-batch"
        assert after["noted"] == before["noted"]
        assert_same_weights(after, before, atol=1e-12)


def test_pipelines_side_by_side_split_alike(world4: World) -> None:
    module = partial(Resumable, "adamw")
    reference = fitted(module, 1, case=SHORT)
    results = world4.run(fitted, module, 4, case=SHORT, balance="time", pipeline_parallel_size=2)
    for result in results:
        assert_same_weights(result, reference)
    held = [result["noted"] for result in results]
    assert held[0] == held[2]
    assert held[1] == held[3]
    assert "layers.5.weight" in held[1]


class Clinging(Resumable):
    """Keeps what torch does not exchange tensors under: a weak reference to one that has to move."""

    def on_train_start(self) -> None:
        self.kept = weakref.ref(self.layers[5].weight)


def test_a_parameter_that_cannot_move_is_named(world2: World) -> None:
    words = r"layers\.5\.weight cannot move.*balance='parameters'"
    world2.run_raising(PipelineError, words, fitted, partial(Clinging, "sgd"), case=SHORT, balance="time")


def validate() -> list[str]:
    trainer = make_trainer(Case(), PipelineStrategy(balance="time"), 2)
    trainer.validate(Classifier(), train_loader(Case(), 1), verbose=False)
    return sorted(trainer.callback_metrics)


def test_validation_alone_measures_nothing(world2: World) -> None:
    assert world2.run(validate) == [["val_accuracy", "val_loss", "val_samples"]] * 2
    assert " B of parameters" in world2.output(0)
