"""Lone steps: ranks that train alone, in forked processes, are timed, and leave the module as it was."""

from __future__ import annotations

import errno
import functools
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_multigpu.communication.metering.clocks import HostClock
from lightning_multigpu.strategies.steps.lone_steps import LoneRank, LoneStepsError, _phases, _Step, lone_steps
from tests.world import World

WIDTH = 8
pytestmark = pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")


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


Manual = functools.partial(Module, optimizers=2)


class WithoutPairs(Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH))


def _measured(make: type[L.LightningModule], options: dict[str, Any]) -> LoneRank:
    module = make()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    settings = {"accelerator": "cpu", "max_epochs": 1, "accumulate_grad_batches": 2}
    defaults = {"device": torch.device("cpu"), "crowd": 1, "seconds": 0.01}
    found = lone_steps(module, None, settings, **{**defaults, **options})
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    return found


Measured = Callable[..., LoneRank]


@pytest.fixture(scope="module")
def measured() -> Iterator[Measured]:
    """Measures the steps of a new module, which stays as it is.

    Ranks are forked from a process without other threads, as that of the command line.
    """
    world = World(1, may_leak=True)  # the arena of shared values stays in its process
    yield functools.cache(lambda module, **options: world.run(_measured, module, options)[0])
    world.close()


PARAMETERS = 2 * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH)


@pytest.mark.parametrize("crowd", [1, 2])
def test_a_step_is_timed_and_counted(crowd: int, measured: Measured) -> None:
    found = measured(Module, crowd=crowd)
    phases = found.phases
    assert min(phases.forward_s, phases.backward_s, phases.optimizer_s, phases.input_s) > 0
    assert found.samples == 4
    size = 4 * PARAMETERS
    assert found.held.parameters_bytes == found.held.gradients_bytes == size
    assert found.held.optimizer_bytes == 2 * size
    assert found.flops == 3 * 2 * 4 * (4 * 4 * WIDTH * WIDTH)
    assert sum(size for size, _ in found.gradients) == size
    shares = [share for _, share in found.gradients]
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1


def test_phases_within_each_other_count_once_and_adding_to_gradients_apart() -> None:
    """Of two batches an optimizer step, which runs the closure; the second one's backward takes 5 s instead of 4 s."""
    steps, begin = [], 0.0
    for _ in range(3):
        first = [("forward", begin + 1, begin + 3), ("backward", begin + 3, begin + 7)]
        second = [("forward", begin + 9, begin + 11), ("backward", begin + 11, begin + 16)]
        steps += [
            _Step(begin, first, end=begin + 7.5),
            _Step(begin + 8, [*second, ("optimizer", begin + 9, begin + 17)], end=begin + 17.5),
        ]
        begin += 18
    phases = _phases(HostClock(), [*steps, _Step(begin)])
    assert (phases.forward_s, phases.backward_s, phases.adding_s, phases.optimizer_s) == (2.0, 4.0, 1.0, 1.0)
    assert (phases.input_s, phases.other_s, phases.step_s) == (0.5, 1.5, 9.0)


def test_a_rank_of_split_layers_has_its_part_and_its_collectives(measured: Measured) -> None:
    found = measured(Module, tensor_parallel_size=2)
    part = 2 * (4 * WIDTH * WIDTH + 2 * WIDTH + WIDTH)  # of both layers' weights, of the first bias, and the second one
    assert found.held.parameters_bytes == 4 * part
    # Each block sums its output forward, and the second one the gradient of its input.
    assert found.collectives == [("all_reduce", 4 * 4 * WIDTH)] * 3


def test_split_layers_of_a_module_that_optimizes_manually(measured: Measured) -> None:
    """Its step runs in the trials too, and changes neither weights nor the states of the optimizer there."""
    phases = measured(Manual).phases
    assert min(phases.forward_s, phases.backward_s, phases.optimizer_s) > 0
    found = measured(Manual, tensor_parallel_size=2)
    assert found.collectives == measured(Module, tensor_parallel_size=2).collectives
    assert found.held == measured(Module, tensor_parallel_size=2).held


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (WithoutPairs, {"tensor_parallel_size": 2}, "no layer can be split"),
        (Failing, {"crowd": 2}, "KeyError: 'a column'"),
    ],
)
def test_the_error_of_a_rank_is_the_message(module: Any, options: Any, words: str, measured: Measured) -> None:
    with pytest.raises(LoneStepsError, match=words):
        measured(module, **options)


def test_a_rank_that_cannot_be_started_leaves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that had been started waited ten minutes for it."""
    context = multiprocessing.get_context("fork")
    real_start, number = context.Process.start, itertools.count()

    def start(process: Any) -> None:
        if next(number) == 2:
            raise OSError(errno.EAGAIN, "again")
        real_start(process)

    monkeypatch.setattr(context.Process, "start", start)
    with pytest.raises(OSError, match="again"):
        lone_steps(Module(), None, {}, device=torch.device("cpu"), crowd=3, seconds=0.1)
    assert not multiprocessing.active_children()
