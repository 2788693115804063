"""Ranks that take steps of their own, and meet every few steps, before validation, in checkpoints and at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import SGD, Adam

from lightning_multigpu import RingDDPStrategy
from lightning_multigpu.engine.data_parallel.averaging import ModelAverager
from tests.fake_gpu import DEVICE, FakeGPU
from tests.strategies.tasks import (
    Case,
    Classifier,
    eval_loader,
    fit_module,
    make_strategy,
    make_trainer,
    state,
    train_loader,
)
from tests.world import World, init_group, rank

EVERY = 3
PARAMETER_BYTES = (16 * 6 + 16 + 3 * 16 + 3) * 8
NUM_PARAMETERS = 4


class Recorder(Callback):
    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.at_validation: list[dict[str, Tensor]] = []
        self.after_steps: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self.batches.append([value.clone() for value in batch])

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        self.after_steps.append(state(module))

    def on_validation_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.at_validation.append(state(module))


def train(directory: str, *, every: int = EVERY, num_samples: int = 61, **trainer_options: Any) -> dict[str, Any]:
    case = Case(num_samples=num_samples, max_epochs=1, trainer=trainer_options)
    strategy = make_strategy("ring_ddp", average_every=every)
    recorder, module = Recorder(), Classifier()
    saver = ModelCheckpoint(directory, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    data, callbacks = (train_loader(case, 2), eval_loader()), [recorder, saver]
    fit_module(module, strategy, 2, case, *data, callbacks=callbacks, enable_checkpointing=True)
    strategy.meter.flush()
    return {
        "batches": recorder.batches,
        "after_steps": recorder.after_steps,
        "at_validation": recorder.at_validation,
        "weights": state(module),
        "transfers": [[(t.count, t.size_bytes) for t in s.of("all_reduce", "data")] for s in strategy.meter.steps],
    }


def by_hand(batches: list[list[Any]], meetings: set[int]) -> list[dict[str, Tensor]]:
    modules = [Classifier().double() for _ in batches]
    optimizers = [SGD(module.parameters(), lr=0.2, momentum=0.9) for module in modules]
    for step in range(len(batches[0])):
        for module, optimizer, mine in zip(modules, optimizers, batches, strict=True):
            x, y = mine[step]
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if step + 1 in meetings:
            for same in zip(*(module.parameters() for module in modules), strict=True):
                buffers = [o.state[p]["momentum_buffer"] for o, p in zip(optimizers, same, strict=True)]
                for tensors in (same, buffers):
                    mean = torch.stack([t.detach() for t in tensors]).mean(0)
                    for tensor in tensors:
                        tensor.data.copy_(mean)
    return [state(module) for module in modules]


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_weights_and_momentum_are_those_of_local_sgd_by_hand(world2: World, tmp_path: Path) -> None:
    """8 steps, the last of 3 and 2 samples: meetings after 3, at the checkpoint after 4, at 7, at that of 8.

    They send weights and momentum together, and four bytes a parameter to agree on whose momentum there is.
    """
    results = world2.run(train, str(tmp_path))
    expected = by_hand([result["batches"] for result in results], {3, 4, 7, 8})
    for result, weights in zip(results, expected, strict=True):
        assert_close(result["weights"], weights)
        assert result["transfers"][:3] == [[], [], [(2, 2 * PARAMETER_BYTES + 4 * NUM_PARAMETERS)]]
    torch.testing.assert_close(results[0]["weights"], results[1]["weights"], rtol=0, atol=0)
    alone = [result["after_steps"][1] for result in results]
    assert not torch.equal(*(weights["layers.0.weight"] for weights in alone)), "they are on their own between meetings"


def test_validation_checkpoints_and_the_end_see_the_average(world2: World, tmp_path: Path) -> None:
    results = world2.run(train, str(tmp_path), every=100, num_samples=56, val_check_interval=5)
    batches = [result["batches"] for result in results]
    at_4, at_5, at_the_end = (by_hand([mine[:step] for mine in batches], {4, 5, 7})[0] for step in (4, 5, 7))
    for result in results:
        assert_close(result["weights"], at_the_end)
        assert_close(result["at_validation"][0], at_5)
    saved = torch.load(tmp_path / "step=4.ckpt", weights_only=True)
    assert_close(saved["state_dict"], at_4)
    assert len(saved["optimizer_states"][0]["state"]) == NUM_PARAMETERS


def two_moments() -> list[Tensor]:
    """Two parameters; rank 1 has no state of the second one."""
    init_group()
    parameters = [nn.Parameter(torch.full((3,), float(rank()))), nn.Parameter(torch.full((2,), 10.0 * rank()))]
    optimizer = SGD(parameters, lr=1.0, momentum=0.9)
    optimizer.state[parameters[0]] = {"momentum_buffer": torch.full((3,), 1.0 + rank()), "step": torch.tensor(5.0)}
    if rank() == 0:
        optimizer.state[parameters[1]] = {"momentum_buffer": torch.full((2,), 7.0)}

    def average(tensor: Tensor) -> None:
        dist.all_reduce(tensor)
        tensor /= 2

    averager = ModelAverager(2, average)
    assert not averager.average(parameters, [optimizer]), "nobody has stepped"
    assert [averager.stepped(), averager.stepped()] == [False, True]
    assert averager.average(parameters, [optimizer])
    assert not averager.stepped(), "the count begins anew"
    second = optimizer.state[parameters[1]].get("momentum_buffer", torch.empty(0))
    return [*[p.detach() for p in parameters], optimizer.state[parameters[0]]["momentum_buffer"], second]


def test_state_that_one_rank_lacks_stays_as_it_is(world2: World) -> None:
    first, second = world2.run(two_moments)
    for of_one in (first, second):
        assert of_one[0].tolist() == [0.5] * 3
        assert of_one[1].tolist() == [5.0] * 2
        assert of_one[2].tolist() == [1.5] * 3
    assert first[3].tolist() == [7.0] * 2
    assert second[3].numel() == 0


def test_nccl_is_given_tensors_of_the_gpu_only(fake_gpu: FakeGPU) -> None:
    """NCCL refuses a tensor in the host's memory, such as the flags of who has state, or Adam's count of steps."""
    parameters = [nn.Parameter(torch.ones(3, device=DEVICE)), nn.Parameter(torch.ones((), device=DEVICE))]
    optimizer = Adam(parameters, foreach=False)
    for parameter in parameters:
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.ones_like(parameter)}
    given: list[tuple[str, int]] = []
    averager = ModelAverager(1, lambda flat: given.append((flat.device.type, flat.numel())))
    averager.stepped()
    assert averager.average(parameters, [optimizer])
    assert given == [("cuda", 2), ("cuda", 8), ("cuda", 1)]
    assert optimizer.state[parameters[1]]["step"].device.type == "cpu"


def test_losses_that_ranks_would_scale_differently_are_refused() -> None:
    scaler = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="average_every=2 with precision='16-mixed'"):
        make_trainer(Case(), RingDDPStrategy(average_every=2), 2, precision=None, plugins=[scaler])
