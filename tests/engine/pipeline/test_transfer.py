"""Messages that are sent at once and waited for later."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from lightning_multigpu.communication.meter import Meter
from lightning_multigpu.engine.pipeline.transfer import Line
from tests.world import World, init_group, rank

CPU = torch.device("cpu")
LARGE = bytes(range(256)) * (1 << 14)
"""4 MiB, which is more than a connection takes in before somebody reads."""


def from_last() -> Any:
    init_group()
    line = Line(dist.new_group([1, 0], sort_ranks=False), Meter(), CPU)
    others = dist.new_group([0, 1])
    if rank() == 1:  # the first stage's
        dist.barrier(others)
        time.sleep(0.2)
        return line.from_last(None) == LARGE, line._pending
    assert line.from_last(LARGE) is LARGE
    dist.barrier(others)  # which the other rank comes to before it receives anything
    works = [work for work, _ in line._pending]
    under_way = not all(work.is_completed() for work in works)
    line.finish()
    return under_way, all(work.is_completed() for work in works), line._pending


def test_the_last_stage_goes_on_and_waits_when_it_is_asked_to(world2: World) -> None:
    last, first = world2.run(from_last)
    assert first == (True, [])
    assert last == (True, True, [])
