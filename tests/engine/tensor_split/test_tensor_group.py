"""The collectives of a tensor group, through shared memory and over sockets."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engine.tensor_split.shared import counts, tensor_group
from tests.world import World

BIG = (1 << 20) // 8  # float64 of 1 MiB


def _collectives(shared_memory: bool, alone: bool) -> dict[str, Tensor]:
    with tensor_group(shared_memory=shared_memory) as (group, _):
        rank, bounds = group.rank, group.bounds(5)
        start, stop = bounds[rank]
        whole = torch.arange(30.0).view(2, 5, 3)
        with group.alone() if alone else contextlib.nullcontext():
            return {
                "sum": group.all_reduce(whole * (rank + 1), ""),
                "beside": group.begin_all_reduce(torch.full((BIG,), rank + 1.0), "").finish(),
                "gathered": group.all_gather(whole[:, start:stop], 1, bounds, ""),
            }


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "sockets"])
def test_collectives(world: World, shared_memory: bool) -> None:
    whole, ranks = torch.arange(30.0).view(2, 5, 3).double(), world.num_ranks
    total = ranks * (ranks + 1) / 2
    for result in world.run(_collectives, shared_memory, False):
        assert torch.equal(result["sum"], whole * total)
        assert torch.equal(result["beside"], torch.full((BIG,), total, dtype=torch.float64))
        assert torch.equal(result["gathered"], whole)


def test_alone_nobody_is_asked(world2: World) -> None:
    whole = torch.arange(30.0).view(2, 5, 3).double()
    bounds = [(0, 3), (3, 5)]
    for rank, result in enumerate(world2.run(_collectives, True, True)):
        start, stop = bounds[rank]
        assert torch.equal(result["sum"], whole * (rank + 1))
        assert result["beside"][0] == rank + 1
        assert torch.equal(result["gathered"][:, start:stop], whole[:, start:stop])
        assert result["gathered"].sum() == whole[:, start:stop].sum()


def _beside(numel: int) -> tuple[list[str], dict[tuple[str, str], int], float]:
    with tensor_group() as (group, meter):
        tensor = torch.ones(numel)
        pending = group.begin_all_reduce(tensor, "layer")
        threads = [thread.name for thread in threading.enumerate() if thread.name == "tensor-split"]
        total = pending.finish()
        assert total is tensor
        return threads, counts(meter), float(total.sum())


@pytest.mark.parametrize(("numel", "threads"), [(BIG - 1, []), (BIG, ["tensor-split"])])
def test_big_tensors_are_reduced_beside(world2: World, numel: int, threads: list[str]) -> None:
    for result in world2.run(_beside, numel):
        assert result == (threads, {("all_reduce", "tensor layer"): 1}, 2.0 * numel)


def _broken() -> str:
    """What the thread that reduces raises reaches the one that waits."""
    with tensor_group() as (group, _):
        group.abort()
        pending = group.begin_all_reduce(torch.ones(BIG), "layer")
        with pytest.raises(RuntimeError) as caught:
            pending.finish()
        return str(caught.value)


def test_an_error_beside_is_raised_where_it_is_waited_for(world2: World) -> None:
    assert all(world2.run(_broken))


def _of_a_gpu() -> list[tuple[str, int]]:
    """The collectives of torch that tensors which are not on the CPU take."""
    taken: list[tuple[str, int]] = []
    with tensor_group() as (group, meter), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda tensor, group: taken.append(("all_reduce", tensor.numel())))
        patch.setattr(dist, "all_gather", lambda parts, own, group: taken.append(("all_gather", own.numel())))
        tensor = torch.ones(4, 2, device="meta")
        group.all_reduce(tensor, "layer")
        group.begin_all_reduce(tensor.new_ones(BIG), "layer").finish()
        group.all_gather(tensor, 0, [(0, 4), (4, 8)], "layer")
        meter.end_step()
        assert all(totals.memory_bytes == 0 for totals in meter.steps[-1].operations)
    return taken


def test_tensors_on_a_gpu_were_given_to_shared_memory_which_refuses_them(world2: World) -> None:
    """With ``process_group_backend="gloo"`` on GPUs: Gloo takes them to the host by itself."""
    for taken in world2.run(_of_a_gpu):
        assert taken == [("all_reduce", 8), ("all_reduce", BIG), ("all_gather", 8)]
