"""Placeholders have no values and never pass for values."""

import copy

import pytest
import torch
from torch import nn

from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.placeholder import Placeholder, first_placeholder


def layer() -> nn.Linear:
    linear = nn.Linear(3, 2)
    linear.weight = nn.Parameter(Placeholder(linear.weight.data, "parameter weight"))
    return linear


def test_looks_like_the_tensor() -> None:
    weight = layer().weight
    assert isinstance(weight, nn.Parameter)
    looks = (*weight.shape, weight.numel(), weight.dtype, weight.device.type, weight.requires_grad)
    assert looks == (2, 3, 6, torch.float32, "cpu", True)
    assert "parameter weight" in repr(weight)


def test_what_is_computed_from_one_is_one() -> None:
    result = layer()(torch.ones(4, 3))
    assert isinstance(result, Placeholder)
    assert tuple(result.relu().sum(0).shape) == (2,)
    lost = first_placeholder({"loss": [torch.ones(1), result.sum()]})
    assert lost is not None
    assert lost.source == "parameter weight"


def test_its_values_cannot_be_asked_for() -> None:
    weight = layer().weight
    with pytest.raises(PipelineError, match="parameter weight"):
        weight.detach().sum().item()
    with pytest.raises(PipelineError, match="writes parameter weight"):
        torch.zeros(2, 3).copy_(weight)
    with pytest.raises(PipelineError, match="output is changed in place"):
        Placeholder(torch.ones(2), "output", fixed=True).add_(1)


def test_it_is_equal_to_itself_only() -> None:
    """Lightning looks so for a parameter among those of an optimizer."""
    first, second = layer(), layer()
    assert torch.equal(first.weight, first.weight)
    for other in (second.weight, torch.zeros(2, 3), first.bias):
        assert not torch.equal(first.weight, other)
        assert not torch.equal(other, first.weight)


def test_modules_and_optimizers_take_them() -> None:
    linear = copy.deepcopy(layer()).double().to("cpu")
    assert isinstance(linear.weight, Placeholder)
    assert linear.weight.dtype == torch.float64
    for options in ({}, {"foreach": True}, {"fused": True}):
        optimizer = torch.optim.AdamW(linear.parameters(), **options)
        linear.bias.grad = torch.ones_like(linear.bias)
        optimizer.step()
        assert list(optimizer.state_dict()["state"]) == [1]
