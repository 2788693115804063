"""Split layers that compute something else than whole ones are found before anything is trained."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_multigpu import HybridStrategy, TensorSplitStrategy
from lightning_multigpu.engine import parity
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from tests.strategies.tasks import Case, Classifier, make_trainer, state, train_loader
from tests.world import World

MODES: list[bool] = []
Fault = Callable[[], AbstractContextManager[Any]]

HYBRID = {"pipeline_parallel_size": 1, "tensor_parallel_size": 2}


class Gate(nn.Module):
    """A branch whose factor is zero at the start: gradients of its layers are zero then, right or wrong."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(6, 16), nn.Linear(16, 6), nn.Dropout(dropout)
        self.factor = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * self.second(self.dropout(self.first(x).tanh()))  # type: ignore[no-any-return]


class Task(Classifier):
    """Notes the mode of the module in each backward pass, in a list that no dry run restores."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers[0] = nn.Sequential(nn.LayerNorm(6), Gate(dropout), self.layers[0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if loss.requires_grad:
            loss.register_hook(lambda gradient: MODES.append(self.training))
        return loss


def scaled_in_forward(factor: float = 1.5) -> AbstractContextManager[Any]:
    own = TensorGroup._reduce

    def scaled(self: TensorGroup, tensor: Tensor, name: str, **options: Any) -> Tensor:
        return own(self, tensor, name, **options).mul_(factor)

    return mock.patch.object(TensorGroup, "_reduce", scaled)


def not_finite() -> AbstractContextManager[Any]:
    return scaled_in_forward(float("nan"))


def skipped_in_backward() -> AbstractContextManager[Any]:
    """The loss is right."""
    return mock.patch.object(TensorGroup, "begin_all_reduce", lambda self, tensor, name: lambda: tensor)


def one_rank_alone() -> AbstractContextManager[Any]:
    """The other one has right gradients: its own part is scaled on rank 1 alone."""
    own = parity.take_gradients

    def take_gradients(module: nn.Module) -> Any:
        is_split = any(map(split_of, module.parameters()))
        return {name: value * (1 + is_split * dist.get_rank()) for name, value in own(module).items()}

    return mock.patch.object(parity, "take_gradients", take_gradients)


def train(options: dict[str, Any], dropout: float = 0.0, fault: Fault | None = None) -> tuple[list[bool], Any]:
    MODES.clear()
    kind = HybridStrategy if options.keys() >= HYBRID.keys() else TensorSplitStrategy
    module = Task(dropout)
    with fault() if fault else nullcontext():
        make_trainer(Case(max_epochs=1), kind(**options), 2).fit(module, train_loader(Case(), 1))
    return list(MODES), state(module)


@pytest.mark.parametrize(
    ("fault", "dropout", "options", "difference"),
    [
        (scaled_in_forward, 0.5, {}, ""),
        (not_finite, 0.0, {}, "inf"),
        (skipped_in_backward, 0.0, HYBRID, ""),
        (scaled_in_forward, 0.5, HYBRID, ""),  # in evaluation mode
        (one_rank_alone, 0.0, {}, ""),
    ],
)
def test_a_fault_of_split_layers_ends_the_run(
    fault: Fault, dropout: float, options: dict[str, Any], difference: str, world2: World
) -> None:
    words = (
        rf"would .* other gradients than .*: .* parameters differ, most '.*' \(relative difference {difference}.*plan="
    )
    world2.run_raising(PipelineError if options else ValueError, words, train, options, dropout, fault)


def test_a_fault_behind_a_gate_is_found_since_weights_are_moved(world2: World) -> None:
    """Without that, all gradients agree: what reaches the layer before the branch is multiplied by zero."""
    plan = {"layers.0.1.first": "column", "layers.0.1.second": "row"}
    words = r"2 parameters differ, most 'layers\.0\.0\.(weight|bias)'"
    world2.run_raising(ValueError, words, train, {"plan": plan}, 0.0, skipped_in_backward)


def test_verify_steps_0_proves_nothing(world2: World) -> None:
    world2.run(train, {"verify_steps": 0}, 0.0, scaled_in_forward)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_proof_runs_the_step_in_training_mode_unless_it_draws_random_numbers(dropout: float, world2: World) -> None:
    """It leaves no trace: training goes on as without it."""
    ways = [world2.run(train, {"verify_steps": steps}, dropout)[0] for steps in (0, 1)]
    modes = [found for found, _ in ways]
    mode = dropout == 0.0
    assert sorted(modes[1]) == sorted([*modes[0], mode, mode])
    for name, value in ways[1][1].items():
        assert torch.equal(value, ways[0][1][name])
