"""Messages that are sent at once and waited for later."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from lightning_multigpu._torch_compat import new_group_in_order
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.pipeline.stages.layer_interception import Activations
from lightning_multigpu.engine.pipeline.stages.stage_messages import Header, PipelineGroup
from tests.world import World, init_group, rank

CPU = torch.device("cpu")
LARGE = bytes(range(256)) * (1 << 14)
"""4 MiB, which is more than a connection takes in before somebody reads."""


def from_last() -> Any:
    init_group()
    meter = Meter()
    group = PipelineGroup(new_group_in_order([1, 0]), meter, CPU)
    others = dist.new_group([0, 1])
    if rank() == 1:  # the first stage's
        dist.barrier(others)
        time.sleep(0.2)
        return group.from_last(None) == LARGE
    assert group.from_last(LARGE) is LARGE
    dist.barrier(others)  # which the other rank comes to before it receives anything
    group.finish()
    meter.end_step()
    [sends] = meter.steps[0].operations
    return sends


def test_the_last_stage_goes_on_and_waits_when_it_is_asked_to(world2: World) -> None:
    sends, received = world2.run(from_last)
    assert received
    assert sends.exposed_s > 0.1  # nearly all of the time for which the other rank has slept
    assert sends.sent_bytes < len(LARGE) + 10_000


def test_headers_differ_where_activations_do() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    header = Header.of(Activations.of((x, {"mask": torch.ones(2, dtype=torch.bool)})))
    assert header == Header.of(Activations.of((x * 2, {"mask": torch.zeros(2, dtype=torch.bool)})))
    others: list[Any] = [
        (x[:1], {"mask": torch.ones(2, dtype=torch.bool)}),
        (x, {"mask": torch.ones(2)}),
        (x.detach(), {"mask": torch.ones(2, dtype=torch.bool)}),
        (x, {"keep": torch.ones(2, dtype=torch.bool)}),
        x,
    ]
    assert all(header != Header.of(Activations.of(other)) for other in others)
