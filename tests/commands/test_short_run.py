"""Short runs: a module that trains alone, in a forked process, is profiled and stays as it was."""

import functools
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_multigpu.callbacks import ProfilerReport
from lightning_multigpu.callbacks.profile.profiled_window import ActionRecorder
from lightning_multigpu.commands.plans import measured_model as module_under_test
from lightning_multigpu.commands.plans.measured_model import (
    PlannedModule,
    ShortRunError,
    measured_model,
    phases_of,
    short_run,
)
from lightning_multigpu.planning.scaling.model_profile import ModelProfile
from tests.world import World

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Module(L.LightningModule):
    def __init__(self, optimizers: int = 1) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.automatic_optimization = optimizers == 1

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.blocks(batch[0]).square().mean()
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(12, WIDTH)), batch_size=4)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class Failing(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise KeyError("a column")


class AloneOnly(Module):
    """A copy ends, as where its memory is lacking; it has no profile."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if not any(isinstance(callback, ProfilerReport) for callback in self.trainer.callbacks):  # type: ignore[attr-defined]
            os._exit(1)
        return super().training_step(batch, batch_idx)


Manual = functools.partial(Module, optimizers=2)


class WithoutPairs(Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH))


def _measured(make: type[L.LightningModule], sizes: tuple[int, ...]) -> ModelProfile:
    module = make()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    settings = {"accelerator": "cpu", "max_epochs": 1, "accumulate_grad_batches": 2, "limit_train_batches": 0.5}
    subject = PlannedModule(
        module=module, datamodule=None, trainer_settings=settings, callbacks=[], device=torch.device("cpu")
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_ACTIVE", "_BARE"):
            patch.setattr(module_under_test, name, timedelta(seconds=0.01))
        found = measured_model(subject, sizes, sizes)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    return found


Measured = Callable[..., ModelProfile]


@pytest.fixture(scope="module")
def forking() -> Iterator[World]:
    """Runs are forked from a process without other threads, as that of the command line."""
    world = World(1, may_leak=True)  # the arena of shared values stays in its process
    yield world
    world.close()


@pytest.fixture(scope="module")
def measured(forking: World) -> Measured:
    """Measures a new module, which stays as it is."""
    return functools.cache(lambda module, *sizes: forking.run(_measured, module, sizes)[0])


PARAMETERS = 2 * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH)


def test_a_step_is_timed_and_counted(measured: Measured) -> None:
    found = measured(Module, 2)
    phases = found.phases
    assert min(phases.forward_s, phases.backward_s, phases.optimizer_s, phases.input_s) > 0
    assert found.samples == 4
    size = 4 * PARAMETERS
    assert found.held.parameters_bytes == found.held.gradients_bytes == size
    assert found.held.optimizer_bytes == 2 * size + 4 * 8  # a step count of each tensor
    assert found.slowdown[2] >= 1
    assert sum(size for size, _ in found.gradients) == size
    shares = [share for _, share in found.gradients]
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1
    assert found.chain is not None
    assert (found.chain.name, len(found.chain.held)) == ("blocks", 2 + 2)


def test_a_rank_of_split_layers_has_its_part_and_its_collectives(measured: Measured) -> None:
    found = measured(Module, 2).splits[2]
    part = 2 * (4 * WIDTH * WIDTH + 2 * WIDTH + WIDTH)  # of both layers' weights, of the first bias, and the second one
    assert found.held.parameters_bytes == 4 * part
    # Each block sums its output forward, and the second one the gradient of its input.
    assert [(kind, size) for kind, size in found.collectives] == [("all_reduce", 4 * 4 * WIDTH)] * 3


def test_a_module_that_optimizes_manually(measured: Measured) -> None:
    """Its step runs in the trials too, and changes neither weights nor the states of the optimizer there."""
    found = measured(Manual, 2)
    assert min(found.phases.forward_s, found.phases.optimizer_s) > 0
    assert (found.splits[2].collectives, found.splits[2].held) == (
        measured(Module, 2).splits[2].collectives,
        measured(Module, 2).splits[2].held,
    )
    assert "manual optimization is not possible" in found.refused["pipelines"]


def test_beside_copies_that_die_nothing_is_measured(measured: Measured) -> None:
    """The model was then nearly as fast as alone, and nothing said so."""
    assert measured(AloneOnly, 2).slowdown == {}


def _with_slow_records() -> tuple[float, float]:
    def stop(recorder: ActionRecorder, action_name: str) -> None:
        time.sleep(1e-3)
        stop_before(recorder, action_name)

    subject = PlannedModule(
        module=Module(), datamodule=None, trainer_settings={"accelerator": "cpu"}, callbacks=[],
        device=torch.device("cpu"),
    )  # fmt: skip
    stop_before = ActionRecorder.stop
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_under_test, "_ACTIVE", timedelta(seconds=0.01))
        patch.setattr(module_under_test, "_BARE", timedelta(seconds=0.01))
        patch.setattr(ActionRecorder, "stop", stop)
        run = short_run(subject)
    return run.phases.step_s, phases_of(run.document).step_s


def test_a_step_is_as_long_as_without_the_records_of_its_profile(forking: World) -> None:
    """Steps of some milliseconds were planned 15 % too long."""
    bare_s, profiled_s = forking.run(_with_slow_records)[0]
    assert bare_s < profiled_s / 3


def test_what_cannot_be_measured_has_its_reason(measured: Measured) -> None:
    found = measured(WithoutPairs, 2)
    assert found.refused["tensor_split on 2 ranks"] == "no layer can be split"
    with pytest.raises(ShortRunError, match="KeyError: 'a column'"):
        measured(Failing)
