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


class Manual(Module):
    def __init__(self) -> None:
        super().__init__(optimizers=2)


class Failing(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise KeyError("a column")


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


def test_phases_within_each_other_count_once() -> None:
    """Of two steps, in seconds: the optimizer's step runs the closure, as Lightning does."""
    first = _Step(0.0, [("forward", 1.0, 3.0), ("backward", 3.0, 7.0), ("optimizer", 1.0, 8.0)], end=8.5)
    steps = [first, _Step(9.0, first.phases, end=17.5), _Step(18.0)]
    steps[1].phases = [(phase, start + 9.0, end + 9.0) for phase, start, end in first.phases]
    phases = _phases(HostClock(), steps)
    assert (phases.forward_s, phases.backward_s, phases.optimizer_s) == (2.0, 4.0, 1.0)
    assert (phases.input_s, phases.other_s) == (0.5, 1.5)
    assert phases.step_s == 9.0


def test_a_backward_that_adds_to_gradients_is_timed_apart() -> None:
    """Two batches an optimizer step: the second one's backward takes 5 s instead of 4 s."""
    steps, begin = [], 0.0
    for _ in range(3):
        steps.append(_Step(begin, [("forward", begin, begin + 2), ("backward", begin + 2, begin + 6)], end=begin + 6))
        begin += 6
        second = [("forward", begin, begin + 2), ("backward", begin + 2, begin + 7), ("optimizer", begin, begin + 8)]
        steps.append(_Step(begin, second, end=begin + 8))
        begin += 8
    phases = _phases(HostClock(), [*steps, _Step(begin)])
    assert (phases.forward_s, phases.backward_s, phases.adding_s, phases.optimizer_s) == (2.0, 4.0, 1.0, 1.0)


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
