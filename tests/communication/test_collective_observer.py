"""What the meter tells of collectives while they are under way."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_multigpu.communication.digest import ranks_text
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.job.guardian.hang.flight_recorder import parse_ranks
from tests.world import World, init_group


class Told:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.fields: list[dict[str, Any]] = []

    def began(self, operation: str, *, awaited: bool = True, **fields: Any) -> "Told":
        self.fields.append({"operation": operation, **fields})
        self.events.append("began" if awaited else "began, not awaited")
        return self

    def awaited(self) -> None:
        self.events.append("awaited")

    def ended(self) -> None:
        self.events.append("ended")

    def broke(self) -> None:
        self.events.append("broke")


def noted_meter() -> tuple[Meter, Told]:
    meter, told = Meter(), Told()
    meter.notes = told
    return meter, told


def test_an_error_breaks_it_and_the_meter_goes_on() -> None:
    meter, told = noted_meter()
    with pytest.raises(ValueError, match="lost"), meter.blocking("barrier", group="w", group_size=2, size_bytes=0):
        raise ValueError("lost")
    assert told.events == ["began", "broke"]
    meter.end_step()
    assert meter.steps[0].operations[0].count == 1


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([0, 1, 2, 3], "0-3"), ([1, 3, 5], "1-5:2"), ([0, 3, 4], "0,3,4"), ([7], "7"), ([4, 2], "4,2"), ([], "")],
)
def test_members_as_text_and_back(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text
    assert parse_ranks(text) == tuple(ranks)


def _group() -> dist.ProcessGroup:
    init_group()
    group = dist.group.WORLD
    assert group is not None
    return group


def _group_events() -> tuple[list[str], list[dict[str, Any]]]:
    meter, told = noted_meter()
    metered = MeteredGroup(_group(), meter, name="world", device=torch.device("cpu"))
    metered.all_reduce(torch.ones(3), "sum")
    metered.barrier()
    metered.broadcast_object("x" * 100, 0)  # more than fits into the first message
    return told.events, told.fields


def test_every_collective_of_a_group(world2: World) -> None:
    for events, fields in world2.run(_group_events):
        assert events == ["began", "ended"] * 4
        assert [f["operation"] for f in fields] == ["all_reduce", "barrier", "broadcast", "broadcast"]
        assert {(f["group"], f["ranks"]) for f in fields} == {("world", "0-1")}
