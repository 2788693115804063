"""Gradients without values have the norms of those with values; each counts once, also where layers are split."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm

from lightning_multigpu._torch_compat import new_group_in_order
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.pipeline.stages.gradients import RemoteGradient, StageSums
from lightning_multigpu.engine.pipeline.stages.stage_messages import PipelineGroup
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.tensor_split.parameter_split import ParameterSplit
from lightning_multigpu.engine.tensor_split.parts import PartLayout, cut
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from tests.world import World, init_group

ORDERS = (1.0, 2.0, float("inf"))


def values(seed: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def remote(gradient: Tensor) -> Parameter:
    """A parameter of another stage, and what is known of its gradient."""
    parameter = Parameter(Placeholder(gradient, "parameter weight"))
    norms = {order: torch.linalg.vector_norm(gradient, order).double() for order in ORDERS}
    parameter.grad = RemoteGradient.of(parameter, "the gradient of parameter weight", norms)
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
        4 * gradient.div_(-4).norm(order),
    ):
        assert not isinstance(found, Placeholder)
        torch.testing.assert_close(found, expected)


def test_values_are_not_to_be_had() -> None:
    gradient, changed = (gradient_of(remote(values(seed))) for seed in (1, 2))
    changed.clamp_(-0.01, 0.01)
    for read in (
        lambda: changed.norm().item(),
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
    assert torch.isfinite(found).all() == found.isfinite().all() == torch.isfinite(gradient).all()
    assert torch.isnan(found).any() == torch.isnan(gradient).any()
    assert found.isinf().any() == gradient.isinf().any()
    assert torch.isfinite(found).shape == gradient.shape


def sums_and_norms() -> tuple[float, list[list[float]]]:
    """Ranks 0 and 1 have the last stage, 2 and 3 the first; each stage has a whole and a split parameter.

    A third parameter is that of the last stage, and rank 1 has no entry of it.
    """
    init_group()
    rank = dist.get_rank()
    lines = [new_group_in_order([2 + number, number]) for number in range(2)]
    tensor = [dist.new_group([2 * number, 2 * number + 1]) for number in range(2)]
    group = TensorGroup(tensor[rank // 2], meter=Meter())
    sums = StageSums(PipelineGroup(lines[rank % 2], Meter(), torch.device("cpu")), group)
    whole, split = Parameter(torch.zeros(1)), Parameter(torch.zeros(2))
    cut(split, PartLayout(ParameterSplit.even(2, 2), group, "split"))
    whole.grad, split.grad = torch.tensor([1.0 + rank // 2]), torch.tensor([3.0 + rank])
    total = float(sums.sum(torch.tensor(10.0**rank)))
    short = Parameter(torch.zeros(1))
    cut(short, PartLayout(ParameterSplit.even(1, 2), group, "short"))
    short.grad = torch.full((1 - rank % 2,), -7.0)
    counted = [rank < 2, rank >= 2, rank < 2]
    of_each = sums.norms([whole, split, short], counted).tolist()
    group.close()
    return total, of_each


def test_each_rank_and_each_parameter_counts_once(world4: World) -> None:
    for total, of_each in world4.run(sums_and_norms):
        assert total == 1111
        assert of_each == [[1, 1, 1, 1], [1, 11, pytest.approx(61**0.5), 6], [1, 7, 7, 7]]
