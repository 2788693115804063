"""Sums and norms over the stages of pipelines whose layers are split."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from lightning_multigpu._torch_compat import new_group_in_order
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.pipeline.stages.gradients import StageSums
from lightning_multigpu.engine.pipeline.stages.stage_messages import PipelineGroup
from lightning_multigpu.engine.tensor_split.parameter_split import ParameterSplit
from lightning_multigpu.engine.tensor_split.parts import PartLayout, cut
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from tests.world import World, init_group


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
