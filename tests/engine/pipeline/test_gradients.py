"""A gradient without values that has the norms of one with values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_value_, get_total_norm

from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.pipeline.stages.gradients import RemoteGradient
from lightning_multigpu.engine.placeholder import Placeholder

ORDERS = (1.0, 2.0, float("inf"))


def values(seed: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def remote(gradient: Tensor) -> Parameter:
    """A parameter of another stage, and what is known of its gradient."""
    parameter = Parameter(Placeholder(gradient, "parameter weight"))
    norms = {order: torch.linalg.vector_norm(gradient, order).double() for order in ORDERS}
    parameter.grad = RemoteGradient(parameter, "the gradient of parameter weight", norms)
    return parameter


def local(gradient: Tensor) -> Parameter:
    parameter = Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    return parameter


def gradient_of(parameter: Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("order", ORDERS)
def test_norms_however_they_are_asked_for(order: float) -> None:
    expected = torch.linalg.vector_norm(values(1), order)
    gradient = gradient_of(remote(values(1)))
    for found in (
        gradient.norm(order),
        gradient.data.norm(order),
        gradient.detach().norm(p=order),
        torch.linalg.vector_norm(gradient, order),
        get_total_norm([gradient], order),
    ):
        assert not isinstance(found, Placeholder)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected)


def test_norms_follow_a_division() -> None:
    gradient = gradient_of(remote(values(1)))
    gradient.div_(-4)
    torch.testing.assert_close(gradient.norm(), values(1).norm() / 4)


def test_other_changes_leave_no_norms() -> None:
    parameters = [local(values(1)), remote(values(2))]
    clip_grad_value_(parameters, 0.01)
    assert gradient_of(parameters[0]).abs().max() <= 0.01
    with pytest.raises(PipelineError, match="computes with the gradient of parameter weight"):
        gradient_of(parameters[1]).norm().item()


def test_values_are_not_to_be_had() -> None:
    gradient = gradient_of(remote(values(1)))
    for read in (
        lambda: gradient.mean().item(),
        lambda: gradient.norm(3).item(),
        lambda: gradient.norm(2, dim=0).sum().item(),
        lambda: gradient.cpu().numpy(),
        lambda: gradient.tolist(),
    ):
        with pytest.raises(PipelineError, match="the gradient of parameter weight"):
            read()


@pytest.mark.parametrize("entry", [0.0, 3e38, float("nan"), float("inf"), float("-inf")])
def test_whether_all_is_finite(entry: float) -> None:
    gradient = values(1)
    gradient[0, 0] = entry if abs(entry) < float("inf") else 0.0  # twice: the sum of large entries is infinite
    gradient[1, 2] = entry
    found = gradient_of(remote(gradient))
    assert torch.isfinite(found).all() == torch.isfinite(gradient).all()
    assert found.isfinite().all() == gradient.isfinite().all()
    assert torch.isnan(found).any() == torch.isnan(gradient).any()
    assert found.isinf().any() == gradient.isinf().any()
    assert torch.isfinite(found).shape == gradient.shape
