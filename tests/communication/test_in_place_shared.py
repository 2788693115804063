"""Tensors in shared memory, reduced where they are: their sums to the bit, and what they do without."""

import itertools
import os
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_multigpu.communication.hierarchy import MOST_MOVED, HierarchicalAllReduce
from lightning_multigpu.communication.ring import chunk_bounds
from lightning_multigpu.communication.shared_memory import host_all_reduce as shared_memory_module
from lightning_multigpu.communication.shared_memory import in_place_shared
from lightning_multigpu.communication.shared_memory.segment import SharedMemoryUnavailableError
from tests.communication.shared import shared_memory, short_of_memory
from tests.communication.test_host_all_reduce import contribution, sum_in_rank_order
from tests.world import World, init_group

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64]
NUMELS = [1, 2, 3, 5, 1024, 200_001]  # the last one in several chunks
CASES = list(itertools.product(DTYPES, NUMELS))


def _mappings() -> int:
    """Of torch's shared memory in this process."""
    return Path("/proc/self/maps").read_text().count("/dev/shm/torch_")


def _sums() -> list[Tensor]:
    results = []
    with shared_memory() as shared, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory_module, "IN_PLACE_FROM_BYTES", 0)
        for key, (dtype, numel) in enumerate(CASES):
            tensor = contribution(shared.rank, numel, dtype)
            part = tensor[numel // 2 :]
            shared.move(tensor, key)
            assert shared.has_moved(tensor)
            assert not shared.has_moved(tensor[: numel - 1]), "only its address is the same"
            assert part.data_ptr() == tensor.data_ptr() + numel // 2 * tensor.element_size()
            assert torch.equal(tensor, contribution(shared.rank, numel, dtype))
            for _ in range(2):  # in the same place again
                tensor.copy_(contribution(shared.rank, numel, dtype))
                assert shared(tensor, average=dtype.is_floating_point) is tensor
            assert torch.equal(part, tensor[numel // 2 :])
            results.append(tensor.clone())
    return results


def test_sums_in_rank_order_to_the_bit(world: World) -> None:
    for results in world.run(_sums):
        for (dtype, numel), result in zip(CASES, results, strict=True):
            expected = sum_in_rank_order(world.num_ranks, numel, dtype, dtype.is_floating_point)
            assert torch.equal(result, expected), (dtype, numel)


def _many_shards() -> None:
    with shared_memory() as shared:
        tensor = torch.empty(4_000_000)  # so that a copy takes long enough to be seen half done
        shared.move(tensor, 0)
        n = shared.world_size
        for call in range(8):
            if call % n == shared.rank:
                torch.randn(200_000).sort()
            tensor.fill_(call + shared.rank)
            own = shared.reduce_scatter(tensor, average=call > 3)
            assert own[0].item() == pytest.approx((call + (n - 1) / 2) * (1 if call > 3 else n))
            assert bool((own == own[0]).all()), call
            if (call + 1) % n == shared.rank:
                torch.randn(200_000).sort()
            own.fill_(shared.rank)
            shared.all_gather(tensor)
            for other, (_, b) in enumerate(chunk_bounds(tensor.numel(), n)):
                assert tensor[b - 1] == other, call
            for other, (a, b) in enumerate(chunk_bounds(tensor.numel(), n)):
                assert bool((tensor[a:b] == other).all()), call


def test_no_rank_is_too_early_or_too_late(world: World) -> None:
    """Ranks are early and late in turn; values tell the call, so that what was left cannot pass for a sum."""
    world.run(_many_shards)


def _successors() -> tuple[int, int, int]:
    before = _mappings()
    with shared_memory() as shared:
        for numel in (10, 20, 30):
            tensor = torch.full((numel,), 1.0 + shared.rank)
            shared.move(tensor, 0)
            assert shared(tensor)[0] == sum(range(1, 1 + shared.world_size))
        del tensor
        during = _mappings()
    return before, during, _mappings()


def test_a_successor_takes_the_place_and_nothing_is_left(world2: World) -> None:
    """DistributedDataParallel arranges its buckets anew behind the first step."""
    for before, during, after in world2.run(_successors):
        assert (before, during, after) == (0, 2, 0)


def _without_room(where: str) -> tuple[str, list[str], bool]:
    def refuse(*_: object) -> None:
        raise RuntimeError("no space left")

    init_group()
    with shared_memory() as shared, pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if shared.rank == 1:
            patch.setattr(in_place_shared, where, refuse)
        tensor = torch.full((100,), 1.0 + shared.rank)
        with pytest.raises(SharedMemoryUnavailableError) as error:
            shared.move(tensor, 0)
        reduce = HierarchicalAllReduce(shared, None)
        moved = [reduce.move(tensor, key) for key in (0, 1)]
        patch.undo()
        assert bool((reduce(tensor) == 3).all())
        return str(error.value), [str(warning.message) for warning in said], any(moved)


@pytest.mark.parametrize("where", ["_offered", "_mapped"])
def test_without_room_all_ranks_copy_and_one_says_so(world2: World, where: str) -> None:
    for of_rank, (error, said, moved) in enumerate(world2.run(_without_room, where)):
        assert error == "rank 1 of 2 on this host: no space left"
        assert not moved
        assert len(said) == (of_rank == 0)
        assert all("docker run --shm-size" in text for text in said)


def _beyond_the_limit() -> tuple[str, list[str]]:
    with shared_memory() as shared, short_of_memory(), pytest.raises(SharedMemoryUnavailableError) as error:
        shared.move(torch.zeros(1 << 16), 0)
    return str(error.value), [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]


def test_a_bucket_for_which_there_is_no_room_leaves_no_file(world2: World) -> None:
    """Each run in a container with a small /dev/shm left a file there for each rank, for good."""
    for error, left in world2.run(_beyond_the_limit):
        assert "rank 0 of 2 on this host: unable to" in error
        assert not left


def _too_many() -> tuple[bool, bool, int]:
    with shared_memory() as shared:
        reduce = HierarchicalAllReduce(shared, None)
        before = len(os.listdir("/proc/self/fd"))
        last, beyond = (reduce.move(torch.zeros(3), key) for key in (MOST_MOVED - 1, MOST_MOVED))
        return last, beyond, len(os.listdir("/proc/self/fd")) - before


def test_tensors_do_not_eat_up_the_descriptors(world2: World) -> None:
    for last, beyond, descriptors in world2.run(_too_many):
        assert (last, beyond) == (True, False)
        assert descriptors <= 1
