"""The collectives of a tensor group, through shared memory and over sockets."""

import contextlib
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from lightning_multigpu.communication.ring import chunk_bounds
from tests.engine.tensor_split.shared import counts, tensor_group
from tests.world import World

BIG = (1 << 20) // 8  # float64 of 1 MiB


def _collectives(shared_memory: bool, alone: bool) -> None:
    with tensor_group(shared_memory=shared_memory) as (group, _), group.alone() if alone else contextlib.nullcontext():
        whole, bounds = torch.arange(30.0).view(2, 5, 3), chunk_bounds(5, group.size)
        start, stop = bounds[group.rank]
        total = group.rank + 1 if alone else group.size * (group.size + 1) / 2
        assert torch.equal(group.all_reduce(whole * (group.rank + 1), ""), whole * total)
        beside = group.begin_all_reduce(torch.full((BIG,), group.rank + 1.0), "")()
        assert torch.equal(beside, torch.full((BIG,), total))
        gathered = group.all_gather(whole[:, start:stop], 1, bounds, "")
        if alone:
            assert gathered.sum() == whole[:, start:stop].sum()
            gathered, whole = gathered[:, start:stop], whole[:, start:stop]
        assert torch.equal(gathered, whole)


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "sockets"])
def test_collectives(world: World, shared_memory: bool) -> None:
    world.run(_collectives, shared_memory, False)


def test_alone_nobody_is_asked(world2: World) -> None:
    world2.run(_collectives, True, True)


def _beside(numel: int, is_beside: bool) -> None:
    with tensor_group() as (group, meter):
        tensor = torch.ones(numel)
        pending = group.begin_all_reduce(tensor, "layer")
        assert is_beside == any("tensor-split" in thread.name for thread in threading.enumerate())
        assert pending() is tensor
        assert counts(meter) == {("all_reduce", "tensor layer"): 1}
        assert float(tensor.sum()) == 2.0 * numel


@pytest.mark.parametrize(("numel", "is_beside"), [(BIG - 1, False), (BIG, True)])
def test_big_tensors_are_reduced_beside(world2: World, numel: int, is_beside: bool) -> None:
    world2.run(_beside, numel, is_beside)


def an_error_beside_is_raised_where_it_is_waited_for() -> None:
    with tensor_group() as (group, _):
        group.abort()
        pending = group.begin_all_reduce(torch.ones(BIG), "layer")
        with pytest.raises(RuntimeError):
            pending()


def tensors_on_a_gpu_were_given_to_shared_memory_which_refuses_them() -> None:
    """With ``process_group_backend="gloo"`` on GPUs: Gloo takes them to the host by itself."""
    taken: list[tuple[str, int]] = []
    with tensor_group() as (group, meter), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda tensor, group: taken.append(("all_reduce", tensor.numel())))
        patch.setattr(dist, "all_gather", lambda parts, own, group: taken.append(("all_gather", own.numel())))
        tensor = torch.ones(4, 2, device="meta")
        group.all_reduce(tensor, "layer")
        group.begin_all_reduce(tensor.new_ones(BIG), "layer")()
        group.all_gather(tensor, 0, [(0, 4), (4, 8)], "layer")
        meter.end_step()
        assert all(totals.memory_bytes == 0 for totals in meter.steps[-1].operations)
    assert taken == [("all_reduce", 8), ("all_reduce", BIG), ("all_gather", 8)]


@pytest.mark.parametrize(
    "check",
    [an_error_beside_is_raised_where_it_is_waited_for, tensors_on_a_gpu_were_given_to_shared_memory_which_refuses_them],
)
def test_on_ranks(world2: World, check: Callable[[], None]) -> None:
    world2.run(check)
