"""Measured costs of the parts of a step; gradients are left unchanged."""

import random

import pytest
import torch
from torch import Tensor, nn

from lightning_multigpu._torch_compat import new_group_in_order
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.pipeline.measuring.layer_costs import layer_costs
from lightning_multigpu.engine.pipeline.splitting.chain import find_chain
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.pipeline.stages.stage_messages import PipelineGroup
from lightning_multigpu.planning.pipelines.stage_costs import PartCost
from tests.world import World, init_group, rank

SAMPLES, WIDTH = 5, 4
CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(3, WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.5),
            nn.Identity(),
            nn.Linear(WIDTH, 2),
        )
        self.behind = nn.Linear(2, 1)
        self.noises: list[float] = []

    def step(self, x: Tensor) -> Tensor:
        self.noises.append(random.random())
        loss: Tensor = self.behind(self.layers(self.before(x))).square().mean()
        return loss


def probed(bounds: list[tuple[int, int]]) -> dict[int, PartCost]:
    init_group()
    module = Model()
    pipeline = PipelineGroup(new_group_in_order([1, 0]), Meter(), CPU)
    ownership = Ownership(module, find_chain(module, "layers", 2), bounds, 1 - rank(), 2, pipeline)
    ownership.drop()
    for parameter in ownership.held():
        parameter.grad = torch.full_like(parameter, 7.0)
    parts = layer_costs(ownership, lambda: module.step(torch.ones(SAMPLES, 3)), seed=3)
    assert {float(parameter.grad.min()) for parameter in ownership.held()} == {7.0}  # type: ignore[union-attr]
    assert len(set(module.noises)) == 1, "the same noise in every run"
    assert len(module.noises) == 5 * len(bounds) / 2
    assert not any("forward" in vars(layer) for layer in module.layers)
    return parts


def floats(*shape: int) -> int:
    return 4 * torch.Size(shape).numel()


def assert_sizes(parts: dict[int, PartCost]) -> None:
    """Of what is sent and kept, where layers 0 and 1 are on the first stage."""
    output = floats(SAMPLES, WIDTH)
    assert [parts[part].output_bytes for part in range(7)] == [*[output] * 6, floats(SAMPLES, 2)]
    kept = [parts[part].saved_bytes for part in range(8)]
    assert kept[0] == floats(SAMPLES, 3), "the linear layer before the chain keeps its input"
    assert kept[1:3] == [output, output], "a linear layer keeps its input, tanh its output"
    assert kept[3] == output, "another stage keeps what it has received"
    assert kept[4] in (SAMPLES * WIDTH, output), "dropout keeps its mask"
    assert kept[5:7] == [0, output], "nothing is kept; a linear layer keeps its input"
    assert kept[7] == floats(SAMPLES, 2) + floats(SAMPLES, 1), "the head keeps its input, the square its own"


@pytest.mark.parametrize("bounds", [[(0, 2), (2, 6)], [(0, 1), (1, 3), (3, 4), (4, 6)]])
def test_sizes_times_and_traces(bounds: list[tuple[int, int]], world2: World) -> None:
    results = world2.run(probed, bounds)
    parts = results[0] | results[1]
    assert set(parts) == set(range(8))
    if len(bounds) == 2:
        assert set(results[1]) == {0, 1, 2}
        assert_sizes(parts)
    assert all(part.forward_s > 0 for part in parts.values())
    assert all(parts[part].backward_s > 0 for part in (0, 1, 3, 6, 7))
