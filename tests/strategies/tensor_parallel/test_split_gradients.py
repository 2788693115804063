"""Clipping and skipped steps where ranks hold parts of parameters."""

from __future__ import annotations

import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from lightning_multigpu.engine.tensor_split.parameter_split import ParameterSplit, cut
from lightning_multigpu.strategies.tensor_parallel.split_gradients import SplitGradients
from tests.engine.tensor_split.shared import assert_equal, tensor_group
from tests.world import World

GRADIENTS = [torch.arange(12.0, dtype=torch.float64).view(4, 3), torch.full((5,), 2.0, dtype=torch.float64)]


def _clip(num_split: int) -> None:
    with tensor_group() as (group, _):
        parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in GRADIENTS]
        whole = [nn.Parameter(torch.zeros_like(gradient)) for gradient in GRADIENTS]
        splits = [ParameterSplit.even(len(gradient), group.size) for gradient in GRADIENTS]
        for number, (parameter, gradient) in enumerate(zip(parameters, GRADIENTS, strict=True)):
            whole[number].grad = gradient.clone()
            if number < num_split:
                cut(parameter, splits[number], group.rank)
                gradient = splits[number].part(gradient, group.rank)
            parameter.grad = gradient.clone()
        plugin = Precision()
        gradients = SplitGradients(plugin, group, LightningModule())
        plugin.clip_grad_by_norm(torch.optim.SGD(parameters), 1.5)
        gradients.end()
        assert plugin.clip_grad_by_norm.__func__ is Precision.clip_grad_by_norm  # type: ignore[attr-defined]
        clip_grad_norm_(whole, 1.5)
        for number, (parameter, reference) in enumerate(zip(parameters, whole, strict=True)):
            assert reference.grad is not None
            assert parameter.grad is not None
            own = splits[number].part(reference.grad, group.rank) if number < num_split else reference.grad
            assert_equal(parameter.grad, own)


@pytest.mark.parametrize("num_split", [0, 1, 2])
def test_clips_by_the_norm_of_whole_gradients(world2: World, num_split: int) -> None:
    world2.run(_clip, num_split)


def _step() -> tuple[Tensor, float]:
    with tensor_group() as (group, _):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        gradients = SplitGradients(MixedPrecision("16-mixed", "cpu", scaler), group, LightningModule())
        parameter = nn.Parameter(torch.ones(2, dtype=torch.float32))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler.scale(torch.zeros(()))
        parameter.grad = torch.tensor([2.0, torch.inf if group.rank == 1 else 4.0], dtype=torch.float32)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        gradients.end()
        return parameter.detach(), scaler.get_scale()


def test_all_ranks_skip_a_step_in_which_one_overflows(world2: World) -> None:
    for weights, scale in world2.run(_step):
        assert weights.tolist() == [1, 1]
        assert scale == 2
