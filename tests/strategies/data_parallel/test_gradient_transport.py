"""The transport of gradients: groups of ranks, and training with compression."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_multigpu.communication.shared_memory import segment
from lightning_multigpu.engine.data_parallel.gradient_transport import layout
from tests.strategies.tasks import (
    Case,
    Classifier,
    assert_same_weights,
    dataset,
    fit,
    fit_module,
    make_strategy,
    state,
    train_loader,
)
from tests.world import World, rank

GRADIENT_BYTES = (16 * 6 + 16 + 3 * 16 + 3) * 4  # of the Classifier, in float32
NUM_STEPS = 25


@pytest.mark.parametrize(
    ("lines", "ranks_a_host", "inside", "between"),
    [
        ([[0, 1, 2, 3]], 4, [[0, 1, 2, 3]], []),
        ([[0, 1, 2, 3]], 2, [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        ([[0, 1, 2]], 1, [], [[0, 1, 2]]),
        ([[0, 1, 2]], 2, [], [[0, 1, 2]]),
        ([[0]], 1, [], []),
        # Two hosts of four ranks; neighbours share a model, so that a line has every other rank.
        ([[0, 2, 4, 6], [1, 3, 5, 7]], 4, [[0, 2], [4, 6], [1, 3], [5, 7]], [[0, 4], [2, 6], [1, 5], [3, 7]]),
    ],
    ids=["one host", "two hosts of two", "a rank a host", "hosts of different sizes", "one rank", "other axes"],
)
def test_layout(lines: list[list[int]], ranks_a_host: int, inside: list[list[int]], between: list[list[int]]) -> None:
    assert layout(lines, lambda rank: rank // ranks_a_host) == (inside, between)


@contextmanager
def as_hosts() -> Iterator[None]:
    """Four ranks take themselves for two hosts of two."""
    before = {name: os.environ[name] for name in ("LOCAL_RANK", "NODE_RANK")}
    os.environ.update(LOCAL_RANK=str(rank() % 2), NODE_RANK=str(rank() // 2))
    try:
        yield
    finally:
        os.environ.update(before)


TWO_HOSTS = {"devices": 2, "num_nodes": 2}
LONG = Case(precision="32-true", num_samples=400, trainer={"max_steps": NUM_STEPS, "max_epochs": -1})


@as_hosts()
def train(case: Case = LONG, **options: Any) -> dict[str, Any]:
    strategy, module = make_strategy("ring_ddp", **options), Classifier()
    trainer = fit_module(module, strategy, 4, case, train_loader(case, 4), **TWO_HOSTS)
    strategy.meter.flush()
    last = strategy.meter.steps[-1].of("all_reduce", "data")
    return {
        "weights": state(module),
        "network_bytes": sum(t.sent_bytes - t.memory_bytes for t in last),
        "memory_bytes": sum(t.memory_bytes for t in last),
        "steps": trainer.global_step,
    }


def loss(weights: dict[str, Tensor]) -> float:
    module = Classifier()
    module.load_state_dict(weights, strict=False)
    x, y = dataset(400).tensors
    return float(torch.nn.functional.cross_entropy(module(x), y).detach())


def test_two_hosts_of_two_train_as_one_device_and_each_byte_leaves_its_host_once(world4: World) -> None:
    case, size_bytes = Case(max_epochs=1), 2 * GRADIENT_BYTES
    expected, results = fit(case, None, 1), world4.run(train, case)
    for result in results:
        assert_same_weights(result, expected)
    for host in (results[:2], results[2:]):
        assert sum(result["network_bytes"] for result in host) == size_bytes
        assert sum(result["memory_bytes"] for result in host) == 2 * size_bytes


def test_compressed_training_learns_and_keeps_all_ranks_alike(world4: World) -> None:
    plain_loss = loss(world4.run(train)[0]["weights"])
    results = world4.run(train, compression="int8")
    for result in results:
        assert result["steps"] == NUM_STEPS
        torch.testing.assert_close(result["weights"], results[0]["weights"], rtol=0, atol=0)
        assert result["network_bytes"] < 0.7 * GRADIENT_BYTES / 2
    untrained = loss(state(Classifier()))
    assert loss(results[0]["weights"]) < plain_loss + 0.1 * (untrained - plain_loss)


class Pushed(L.LightningModule):
    """Its gradient is the same in every step; beside its largest numbers the others are rounded to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(len(PUSH)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.weight * PUSH * (1 + self.global_rank)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


PUSH = torch.tensor([127.0, 0.37, -0.23] * 4)


@as_hosts()
def push() -> Tensor:
    options = {"compression": "int8", "average_every": 2, "outer_optimizer": {"lr": 1, "momentum": 0}}
    module = Pushed()
    case = replace(LONG, trainer={"max_steps": 20, "max_epochs": -1})
    fit_module(module, make_strategy("ring_ddp", **options), 4, case, train_loader(case, 4), **TWO_HOSTS)
    return module.weight.detach()


def test_what_is_not_sent_of_changes_is_kept(world4: World) -> None:
    """Ten averages of two steps: errors are kept between averages, and do not add up."""
    first, *others = world4.run(push)
    given = -20 * 2.5 * PUSH
    scale = 2 * 3.5 * 127 / 127  # of the changes of the second host
    assert 0.5 < (first - given).abs().max() < scale < given[2].abs()
    assert all(torch.equal(first, other) for other in others)


class Planted(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 4 and self.trainer.global_rank == 3:
            loss = loss + (self.second.bias * torch.tensor(float("inf"))).sum()
        return loss


@as_hosts()
def scaled() -> dict[str, Any]:
    strategy = make_strategy("ring_ddp", compression="int8")
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3))
    case, module = Case(max_epochs=1), Planted()
    fit_module(module, strategy, 4, case, train_loader(case, 4), plugins=plugin, precision=None, **TWO_HOSTS)
    assert plugin.scaler is not None
    return {"weights": state(module), "scale": plugin.scaler.get_scale()}


def test_loss_scaling_sees_an_infinite_gradient_behind_compression(world4: World) -> None:
    """7 steps: the scale doubles after 3 good ones, is halved by the bad one, and two good ones are too few."""
    results = world4.run(scaled)
    for result in results:
        assert result["scale"] == 1024.0
        assert all(value.isfinite().all() for value in result["weights"].values())
        torch.testing.assert_close(result["weights"], results[0]["weights"], rtol=0, atol=0)


def warned(case: Case, words: str, rank_without_memory: int | None = None) -> tuple[dict[str, Any], list[str]]:
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        if rank() == rank_without_memory:
            patch.setattr(segment, "created_file", _refuse)
        result = fit(case, "ring_ddp", 2)
    return result, [str(w.message) for w in caught if words in str(w.message)]


def _refuse(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def test_without_shared_memory_gradients_take_the_ring_with_one_warning(world2: World) -> None:
    expected = fit(Case(max_epochs=1), None, 1)
    (first, [message]), (second, none) = world2.run(warned, Case(max_epochs=1), "sockets", 0)
    assert "No space left on device" in message
    assert not none
    for result in (first, second):
        assert_same_weights(result, expected)


def test_compression_on_one_host_says_that_it_has_no_effect(world2: World) -> None:
    case = Case(max_epochs=1, strategy={"compression": "bf16"})
    (_, [message]), (_, none) = world2.run(warned, case, "no effect")
    assert "shared_memory=False compresses there too" in message
    assert not none
