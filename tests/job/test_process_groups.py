"""The groups of a rank after a failure: aborted so that none waits for another, and within a limit."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_multigpu.job import process_groups
from lightning_multigpu.job.process_groups import ProcessGroups
from tests.world import World, init_group

DEVICE = torch.device("cuda", 0)


class Group:
    def __init__(self, backend: str, abort: Callable[[], object]) -> None:
        self.backend, self.abort = backend, abort


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    order: list[str] = []
    monkeypatch.setattr(process_groups, "moves_by_nccl", lambda group: group.backend == "nccl")
    monkeypatch.setattr(process_groups, "leave_world", lambda: order.append("destroyed"))
    monkeypatch.setattr(process_groups.CONNECTIONS, "cut", lambda except_port: order.append("sockets"))
    yield order
    for thread in threading.enumerate():
        if thread.name == "abort-nccl":
            thread.join(10)


def groups_of(monkeypatch: pytest.MonkeyPatch, *members: Any, backend: str = "gloo") -> ProcessGroups:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(ProcessGroups, "world", members[0])
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    environment: Any = SimpleNamespace(main_address="127.0.0.1", main_port=1)
    groups = ProcessGroups(environment, DEVICE, (2, 1, 1), backend=backend, timeout=None, store=None)
    groups.own = list(members[1:])
    return groups


def test_the_abort_of_a_group_may_wait_for_the_kernel_of_another(
    order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, the first abort waited for the second group's kernel, which only its own abort ends."""
    all_begun = threading.Barrier(2)

    def abort() -> None:
        order.append("nccl")
        all_begun.wait(timeout=2)
        order.append("aborted")

    over_nccl = [Group("nccl", abort) for _ in range(2)]
    groups = groups_of(monkeypatch, over_nccl[0], Group("gloo", lambda: order.append("gloo")), over_nccl[1])
    groups.cut()
    groups.leave(failed=True)
    assert order == ["sockets", "gloo", "nccl", "nccl", "aborted", "aborted", "destroyed"]


def test_a_device_that_does_not_answer_is_given_up(order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank ended by its guardian, 15 s later, where a broken driver kept the abort: it told nobody why."""
    monkeypatch.setattr(process_groups, "_ABORT_S", 0.1)
    answers = threading.Event()
    groups = groups_of(
        monkeypatch, Group("nccl", lambda: answers.wait(30)), Group("gloo", lambda: order.append("gloo"))
    )
    groups.cut()
    groups.leave(failed=True)
    answers.set()
    assert order == ["sockets", "gloo"], "nor is it waited for once more when groups are destroyed"


def test_a_group_of_gloo_beside_nccl_is_made_without_those_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """``compression`` on GPUs of two hosts: ranks outside of a Gloo group waited for its members in a split of NCCL's
    world, to which they never came. torch decides so by the device to which the world is bound."""
    bound: dict[str, list[torch.device | None]] = {"gloo": [], "nccl": []}
    world = SimpleNamespace(bound_device_id=DEVICE)
    monkeypatch.setattr(
        dist, "new_group", lambda ranks, *, backend, **options: bound[backend].append(world.bound_device_id)
    )
    groups = groups_of(monkeypatch, world, backend="nccl")
    groups.over([[0, 1], [2, 3]], backend="gloo")
    groups.over([[0, 2], [1, 3]])
    assert bound == {"gloo": [None, None], "nccl": [DEVICE, DEVICE]}
    assert world.bound_device_id == DEVICE


def groups_of_a_run(shape: tuple[int, int, int]) -> dict[str, tuple[int, ...]]:
    """The ranks of the data axis, and the groups of more than one rank; over Gloo each is a mesh of TCP."""
    init_group()
    environment: Any = SimpleNamespace(main_address="127.0.0.1", main_port=1)
    groups = ProcessGroups(environment, torch.device("cpu"), shape, backend="gloo", timeout=None, store=None)
    found = {"data": tuple(dist.get_process_group_ranks(groups.data))}
    meshes = [group for group in {*groups.own, groups.world} if dist.get_world_size(group) > 1]
    lines = {axis: tuple(map(tuple, groups.lines(axis))) for axis in process_groups.AXES}
    dist.barrier()  # else a rank that leaves closes connections while others still make theirs
    groups.leave(failed=False)
    return {**found, "groups": (len(meshes),), "lines": lines["pipeline"]}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 1, 1), {"data": (0, 1, 2, 3), "groups": (1,)}),
        ((1, 4, 1), {"data": (2,), "groups": (1,)}),
        ((2, 2, 1), {"data": (0, 2), "groups": (2,)}),
    ],
)
def test_axes_share_groups(shape: tuple[int, int, int], expected: dict[str, Any], world4: World) -> None:
    """Six meshes of connections over all ranks were made for ``ring_ddp`` on hosts with one rank each."""
    found = world4.run(groups_of_a_run, shape)[2]
    assert {name: found[name] for name in expected} == expected
    assert len(found["lines"]) == 4 // shape[1]
