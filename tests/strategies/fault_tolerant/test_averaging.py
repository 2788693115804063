"""Averages over the members, and what a failed sum leaves behind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.strategies.fault_tolerant.averaging import GradientAverage
from lightning_multigpu.strategies.fault_tolerant.members import Members

FLAGS = {"counts": True, "averages_buffers": False, "after_meeting": False}
OPTIONS: dict[str, Any] = {"common": 0.0, "loss_scale": 1.0, **FLAGS}


class Two:
    """Two members with the same gradients, of which one is lost in the sum with the number ``fails_at``.

    With ``has_ones`` the other one counts too, and has ones as the gradients of all parameters and as buffers.
    """

    size, index, ranks, wants_to_leave, all_reduce = 2, 0, (0, 1), False, HierarchicalAllReduce(None, None)

    def __init__(self) -> None:
        self.fails_at, self.sums, self.has_ones = -1, 0, False

    def wants_meeting(self) -> bool:
        return False

    def timeout_s(self, size_bytes: int, *, meets: bool) -> float:
        return 1.0

    def sum(self, tensors: Sequence[Tensor], timeout_s: float, keys: Sequence[Any] = ()) -> None:
        self.sums += 1
        for tensor in tensors:
            if tensor.dtype == torch.float64:  # the header, to which the other one adds its numbers
                tensor[4::2] = tensor[3::2]
                tensor[1] += self.has_ones
                tensor[-1] += self.has_ones  # stands for which gradients there are
            elif self.has_ones:
                tensor.add_(1)
            else:
                tensor.mul_(2)
        if self.sums == self.fails_at:
            raise RuntimeError("a member is lost")


def test_a_rank_alone_divides_by_its_weight() -> None:
    """Weights from a function are no shares: gradients were as many times too large as a batch had tokens."""
    members = Two()
    members.size = 1
    for weight in (0.5, 512.0):
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.tensor([2.0 * weight])
        average = GradientAverage(cast(Members, members), Meter())
        average.average([parameter], [], weight, **OPTIONS)
        assert parameter.grad.tolist() == [2.0]


def test_a_gradient_that_another_rank_has() -> None:
    members = Two()
    members.has_ones = True
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    parameters[0].grad = torch.tensor([2.0])
    GradientAverage(cast(Members, members), Meter()).average(parameters, [], 1.0, **OPTIONS)
    assert [None if each.grad is None else each.grad.tolist() for each in parameters] == [[3.0], [1.0]]


def test_buffers() -> None:
    """Ranks that step alone got the first one's statistics, where ``ring_ddp`` averages them.

    A rank that comes in has made NaN of the infinities of an attention mask.
    """
    members = Two()
    members.index, members.has_ones = 1, True
    mean = {**OPTIONS, "averages_buffers": True}
    for options, expected in (OPTIONS, [1.0, 1]), (mean, [-math.inf, 1]), ({**mean, "counts": False}, [1.0, 1]):
        buffers = [torch.tensor(-math.inf), torch.tensor(7)]
        GradientAverage(cast(Members, members), Meter()).average([], buffers, 0.5, **options)
        assert [buffer.item() for buffer in buffers] == expected


@pytest.mark.parametrize("clears", [True, False], ids=["new gradients", "gradients added to the last average"])
def test_gradients_stay_until_a_sum_has_succeeded(clears: bool) -> None:
    members = Two()
    average = GradientAverage(cast(Members, members), Meter())
    parameter = nn.Parameter(torch.zeros(3))

    def averaged() -> list[float]:
        average.average([parameter], [], 1.0, **OPTIONS)
        assert parameter.grad is not None
        return parameter.grad.tolist()

    parameter.grad = torch.tensor([1.0, 2.0, 3.0])
    assert averaged() == [2.0, 4.0, 6.0]
    if clears:
        parameter.grad = torch.tensor([1.0, 1.0, 1.0])
    else:
        parameter.grad.fill_(1.0)
    members.fails_at = 4
    with pytest.raises(RuntimeError, match="a member is lost"):
        averaged()
    assert parameter.grad.tolist() == [1.0, 1.0, 1.0]
    assert averaged() == [2.0, 2.0, 2.0]
