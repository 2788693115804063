"""The transport of gradients: groups of ranks, training with compression, and its state in checkpoints."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_multigpu import RingDDPStrategy
from lightning_multigpu.communication.shared_memory import segment
from lightning_multigpu.engine.data_parallel.gradient_transport import layout
from lightning_multigpu.strategies.averaged_gradients import CHECKPOINT_KEY
from tests.strategies.tasks import (
    Case,
    Classifier,
    assert_same_weights,
    dataset,
    fit,
    make_strategy,
    make_trainer,
    state,
    train_loader,
)
from tests.world import World, rank

GRADIENT_BYTES = (16 * 6 + 16 + 3 * 16 + 3) * 4  # of the Classifier, in float32
COMPRESSIONS: dict[str, Any] = {
    "fp16": "fp16",
    "bf16": "bf16",
    "int8": {"name": "int8", "chunk_size": 64},
    "topk": {"name": "topk", "ratio": 0.25},
    "powersgd": {"name": "powersgd", "rank": 2, "start_step": 3},
}


@pytest.mark.parametrize(
    ("lines", "ranks_a_host", "inside", "between"),
    [
        ([[0, 1, 2, 3]], 4, [[0, 1, 2, 3]], []),
        ([[0, 1, 2, 3]], 2, [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        ([[0, 1, 2]], 1, [], [[0, 1, 2]]),
        ([[0, 1, 2]], 2, [], [[0, 1, 2]]),
        ([[0]], 1, [], []),
        # Two hosts of four ranks; neighbours share a model, so that a line has every other rank.
        (
            [[0, 2, 4, 6], [1, 3, 5, 7]],
            4,
            [[0, 2], [4, 6], [1, 3], [5, 7]],
            [[0, 4], [2, 6], [1, 5], [3, 7]],
        ),
    ],
    ids=["one host", "two hosts of two", "a rank a host", "hosts of different sizes", "one rank", "other axes"],
)
def test_layout(lines: list[list[int]], ranks_a_host: int, inside: list[list[int]], between: list[list[int]]) -> None:
    assert layout(lines, ranks_a_host) == (inside, between)
    if len(lines) == 1 and len(lines[0]) > 1:
        assert layout(lines, ranks_a_host, use_hosts=False) == ([], lines)


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


@as_hosts()
def fit_on_two_hosts(case: Case) -> dict[str, Any]:
    return fit(case, "ring_ddp", 4)


def test_two_hosts_of_two_train_as_one_device(world4: World) -> None:
    case = Case(trainer=TWO_HOSTS)
    expected = fit(Case(), None, 1)
    for result in world4.run(fit_on_two_hosts, case):
        assert_same_weights(result, expected)


@as_hosts()
def train(directory: str, *, max_steps: int = 50, resume: str | None = None, **options: Any) -> dict[str, Any]:
    strategy = make_strategy("ring_ddp", **options)
    case = Case(precision="32-true", num_samples=400, trainer={"max_steps": max_steps, "max_epochs": -1, **TWO_HOSTS})
    module = Classifier()
    saver = ModelCheckpoint(directory, save_last=True, every_n_train_steps=10)
    trainer = make_trainer(case, strategy, 4, callbacks=[saver], enable_checkpointing=True, **TWO_HOSTS)
    trainer.fit(module, train_loader(case, 4), ckpt_path=resume)
    strategy.meter.flush()
    last = strategy.meter.steps[-1].of("all_reduce", "data")
    return {
        "weights": state(module),
        "network_bytes": sum(t.sent_bytes - t.memory_bytes for t in last),
        "memory_bytes": sum(t.memory_bytes for t in last),
        "steps": trainer.global_step,
    }


def loss(weights: dict[str, Tensor]) -> float:
    """Over all samples."""
    module = Classifier()
    module.load_state_dict(weights, strict=False)
    x, y = dataset(400).tensors
    return float(torch.nn.functional.cross_entropy(module(x), y).detach())


def test_each_byte_leaves_its_host_once(world4: World, tmp_path: Path) -> None:
    results = world4.run(train, str(tmp_path), max_steps=3)
    for host in (results[:2], results[2:]):
        assert sum(result["network_bytes"] for result in host) == GRADIENT_BYTES
        assert sum(result["memory_bytes"] for result in host) == 2 * GRADIENT_BYTES


@pytest.fixture(scope="module")
def plain_loss(ranks4: World, tmp_path_factory: pytest.TempPathFactory) -> float:
    """What the same training reaches without compression."""
    return loss(ranks4.run(train, str(tmp_path_factory.mktemp("plain")))[0]["weights"])


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_compressed_training_learns_and_keeps_all_ranks_alike(
    world4: World, name: str, plain_loss: float, tmp_path: Path
) -> None:
    results = world4.run(train, str(tmp_path), compression=COMPRESSIONS[name])
    for result in results:
        assert result["steps"] == 50
        for parameter, value in results[0]["weights"].items():
            assert torch.equal(value, result["weights"][parameter]), parameter
        assert result["network_bytes"] < 0.7 * GRADIENT_BYTES / 2
    untrained = loss(state(Classifier()))
    assert loss(results[0]["weights"]) < plain_loss + 0.1 * (untrained - plain_loss)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    kept = saved[CHECKPOINT_KEY]["compression"]
    if name in ("int8", "topk", "powersgd"):
        shapes = {key: parameter.shape for key, parameter in Classifier().named_parameters() if parameter.dim() == 2}
        assert {key for key, error in kept["errors"].items() if error.any()} >= set(shapes)
        assert all(kept["errors"][key].shape == shape for key, shape in shapes.items())


class Loaded(Callback):
    """The compression's state as it is when training begins, saved at once."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def resumed_state(source: str, target: str, hosts: dict[str, int]) -> None:
    with as_hosts() if hosts == TWO_HOSTS else nullcontext():
        _resume(source, target, hosts)


def _resume(source: str, target: str, hosts: dict[str, int]) -> None:
    case = Case(precision="32-true", num_samples=400, trainer={"max_steps": 60, "max_epochs": -1, **hosts})
    strategy = make_strategy("ring_ddp", compression=COMPRESSIONS["topk"], compress_inside_hosts=hosts != TWO_HOSTS)
    trainer = make_trainer(case, strategy, hosts["devices"], callbacks=[Loaded(target)], **hosts)
    trainer.fit(Classifier(), train_loader(case, hosts["devices"] * hosts["num_nodes"]), ckpt_path=source)


def test_errors_are_kept_in_checkpoints_by_name_whatever_the_hosts(
    world4: World, world2: World, tmp_path: Path
) -> None:
    world4.run(train, str(tmp_path), compression=COMPRESSIONS["topk"])
    source = tmp_path / "last.ckpt"
    before = torch.load(source, weights_only=True)[CHECKPOINT_KEY]["compression"]["errors"]
    assert any(error.any() for error in before.values())
    for world, hosts in ((world4, TWO_HOSTS), (world2, {"devices": 2, "num_nodes": 1})):
        target = tmp_path / f"{world.num_ranks}.ckpt"
        world.run(resumed_state, str(source), str(target), hosts)
        after = torch.load(target, weights_only=True)[CHECKPOINT_KEY]["compression"]["errors"]
        for name, error in before.items():
            torch.testing.assert_close(after.get(name, torch.zeros_like(error)), error, rtol=1e-6, atol=1e-8)


def test_stock_lightning_resumes_the_file(world4: World, tmp_path: Path) -> None:
    world4.run(train, str(tmp_path), max_steps=10, compression="int8")
    case = Case(precision="32-true", trainer={"max_steps": 12, "max_epochs": -1})
    trainer = make_trainer(case, "auto", 1)
    trainer.fit(Classifier(), train_loader(case, 1), ckpt_path=str(tmp_path / "last.ckpt"))
    assert trainer.global_step == 12


class Planted(Classifier):
    """An infinite gradient in one step, on one rank, in one layer."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 4 and self.trainer.global_rank == 3:
            loss = loss + (self.second.bias * torch.tensor(float("inf"))).sum()
        return loss


@as_hosts()
def scaled() -> dict[str, Any]:
    strategy = make_strategy("ring_ddp", compression=COMPRESSIONS["topk"])
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3))
    case = Case(precision="32-true", trainer={"max_epochs": 1, **TWO_HOSTS})
    trainer = make_trainer(case, strategy, 4, plugins=plugin, precision=None, **TWO_HOSTS)
    module = Planted()
    trainer.fit(module, train_loader(case, 4))
    assert plugin.scaler is not None
    return {"weights": state(module), "scale": plugin.scaler.get_scale(), "losses": module.seen}


def test_loss_scaling_sees_an_infinite_gradient_behind_compression(world4: World) -> None:
    """7 steps: the scale doubles after 3 good ones, is halved by the bad one, and two good ones are too few."""
    results = world4.run(scaled)
    for result in results:
        assert result["scale"] == 1024.0
        for name, value in results[0]["weights"].items():
            assert value.isfinite().all()
            assert torch.equal(value, result["weights"][name])


def without_shared_memory(rank_that_fails: int) -> tuple[dict[str, Any], list[str]]:
    create = segment.created_file
    if rank() == rank_that_fails:
        segment.created_file = _refuse  # type: ignore[assignment]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = fit(Case(max_epochs=1), "ring_ddp", 2)
    finally:
        segment.created_file = create
    return result, [str(w.message) for w in caught if "sockets" in str(w.message)]


def _refuse(*args: Any) -> None:
    raise OSError(28, "No space left on device")


def test_without_shared_memory_gradients_take_the_ring_with_one_warning(world2: World) -> None:
    expected = fit(Case(max_epochs=1), None, 1)
    results = world2.run(without_shared_memory, 0)
    assert [len(messages) for _, messages in results] == [1, 0]
    assert "No space left on device" in results[0][1][0]
    for result, _ in results:
        assert_same_weights(result, expected)


def compression_on_one_host() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Case(max_epochs=1, strategy={"compression": "bf16"}), "ring_ddp", 2)
    return [str(w.message) for w in caught if "no effect" in str(w.message)]


def test_compression_on_one_host_says_that_it_has_no_effect(world2: World) -> None:
    first, second = world2.run(compression_on_one_host)
    assert len(first) == 1
    assert "compress_inside_hosts=True" in first[0]
    assert second == []


def descriptors() -> list[str]:
    before = {os.readlink(f"/proc/self/fd/{entry.name}") for entry in Path("/proc/self/fd").iterdir() if entry.exists()}
    fit(Case(max_epochs=1), "ring_ddp", 2)
    after = [os.readlink(f"/proc/self/fd/{entry.name}") for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    return [target for target in after if "memfd:lightning" in target and target not in before]


def test_shared_memory_is_given_back_at_the_end_of_the_run(world2: World) -> None:
    assert world2.run(descriptors) == [[], []]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "int4"}, "compression='int4' is unknown"),
        ({"compression": {"name": "topk", "ratio": 2}}, "ratio"),
        ({"compression": "int8", "average_every": 2}, "leave one of the two out"),
        ({"compression": "int8", "ddp_comm_hook": print}, "both choose how gradients travel"),
    ],
)
def test_what_cannot_be_is_refused_before_any_process_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RingDDPStrategy(**options)
