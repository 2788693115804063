"""The machine of a plan: its file, times of transfers worked by hand, and worlds that were not measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_multigpu.commands.calibrate import read
from lightning_multigpu.planning.scaling.machine import (
    ALL_REDUCE,
    MESSAGE,
    Link,
    Machine,
    MeasuredCollective,
    Point,
    ReferenceCost,
    World,
    all_reduce_s,
    differences,
    ring_all_reduce_s,
    servers_s,
)

LINK = Link.straight(1e-3, 1e-6)  # 1 ms, and 1 us a byte
SLOW = Link.straight(2e-3, 1e-5)
MACHINE = Machine(
    name="this machine",
    device_type="cpu",
    processor="a processor",
    devices=2,
    inside=Link.straight(1e-5, 1e-9),
    between=Link.straight(1e-4, 1e-8),
    collectives=[MeasuredCollective(operation=ALL_REDUCE, world=World(1, 2), link=Link.straight(0.0, 3e-9))],
    references=[
        ReferenceCost(strategy="ring_ddp", world=World(1, 2), fixed_s=1e-3),
        ReferenceCost(strategy="ring_ddp", world=World(4, 1), fixed_s=4e-3),
    ],
    versions={"torch": "2.13.0", "lightning_multigpu": "0.2.0"},
)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    (path := tmp_path / "machine.json").write_text(json.dumps(MACHINE.as_json()))
    assert read(path) == MACHINE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "machine.json is no machine.json"),
        ('{"name": "m"}', "'schema_version'"),
        ('{"schema_version": 1}', "it is of another version.; write one with 'lightning-multigpu calibrate'"),
        ('{"schema_version": 2, "name": "m"}', "the document has no 'device_type'"),
    ],
)
def test_another_file_is_refused_by_field(text: str, message: str, tmp_path: Path) -> None:
    (path := tmp_path / "machine.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_differences_name_the_field_and_both_values() -> None:
    now = replace(MACHINE, versions={"torch": "2.14.0", "numpy": "1"})
    assert differences(MACHINE, now) == ["torch was 2.13.0 at the calibration, and is 2.14.0"]


@pytest.mark.parametrize(
    ("size", "seconds"), [(10, 1.0), (60, 2.0), (110, 3.0), (210, 8.0), (310, 13.0), (0, 0.8), (410, 18.0)]
)
def test_a_time_lies_between_those_of_the_sizes_around_it(size: int, seconds: float) -> None:
    """Before and after all of them it goes on straight."""
    link = Link([Point(10, 1.0), Point(110, 3.0), Point(310, 13.0)])
    assert link.seconds(size) == pytest.approx(seconds)
    assert Link([Point(10, 1.0), Point(20, 3.0)]).seconds(0) == 0, "and never below 0"


def test_a_ring_of_four_has_six_steps_of_a_quarter() -> None:
    assert ring_all_reduce_s(4, 4_000, LINK) == pytest.approx(6 * (1e-3 + 1e-3))


def test_hosts_reduce_inside_and_then_between() -> None:
    inside, between = 2 * (1e-3 + 2e-3), 2 * (2e-3 + 2e-2)
    assert all_reduce_s(World(2, 2), 4_000, LINK, SLOW) == pytest.approx(inside + between)
    assert all_reduce_s(World(1, 1), 4_000, LINK, SLOW) == 0


def test_the_busiest_link_of_servers_decides() -> None:
    # One server on the first of two hosts: the other host's two ranks send all of theirs to it.
    assert servers_s(World(2, 2), 1_000, 1, LINK, SLOW) == pytest.approx(2 * (2e-3 + 1_000 * 1e-5))
    # A server on each host: half of the other's two ranks' gradients come to a host, and half of its own two's weights.
    assert servers_s(World(2, 2), 1_000, 2, LINK, SLOW) == pytest.approx((2 + 2) * (2e-3 + 500 * 1e-5))
    assert servers_s(World(1, 2), 1_000, 2, LINK, SLOW) == pytest.approx(2 * (1e-3 + 500 * 1e-6))


def test_a_measured_all_reduce_comes_before_the_formula() -> None:
    assert MACHINE.all_reduce_s(World(1, 2), 1_000_000) == pytest.approx(3e-3)
    assert MACHINE.all_reduce_s(World(1, 1), 1_000_000) == 0


def test_another_world_is_the_formula_as_far_off_as_the_nearest_measured() -> None:
    formula_2 = 2 * (1e-5 + 500_000 * 1e-9)
    formula_4 = 6 * (1e-5 + 250_000 * 1e-9)
    assert MACHINE.all_reduce_s(World(1, 4), 1_000_000) == pytest.approx(formula_4 * 3e-3 / formula_2)


def test_hosts_need_a_link() -> None:
    alone = Machine(name="a laptop", device_type="cpu")
    with pytest.raises(ValueError, match="2 x 1 needs the link between hosts, which a laptop does not have"):
        alone.all_reduce_s(World(2, 1), 1)
    faster = alone.with_link(8.0)
    assert faster.all_reduce_s(World(2, 1), 1_000_000) == pytest.approx(2 * (20e-6 + 500_000 * 1e-9))


def test_links_of_a_world_come_before_the_last_ones_measured() -> None:
    crowded = MeasuredCollective(operation=MESSAGE, world=World(1, 4), link=Link.straight(1e-3, 1e-9))
    machine = replace(MACHINE, collectives=[crowded])
    assert machine.link_inside(World(1, 4)).seconds(0) == 1e-3
    assert machine.link_inside(World(1, 2)) == MACHINE.inside
    assert machine.link_between(World(2, 1)) == MACHINE.between


def test_costs_of_the_nearest_world_hosts_beside_hosts() -> None:
    assert MACHINE.reference("ring_ddp", World(1, 8)).fixed_s == 1e-3
    assert MACHINE.reference("ring_ddp", World(2, 1)).fixed_s == 4e-3
    assert MACHINE.reference("cpu_ps", World(1, 2)).fixed_s == 0


def test_ranks_that_share_cores() -> None:
    assert MACHINE.crowd(World(2, 2)) == 2
    gpus = Machine(name="gpus", device_type="cuda")
    assert gpus.crowd(World(1, 8)) == 1
    emulated = Machine(name="hosts of one machine", device_type="cpu", shares_cores=True)
    assert emulated.crowd(World(4, 2)) == 8
