"""Collectives through shared memory: their sums to the bit, and that no rank is too early or too late."""

import time

import pytest
import torch
import torch.distributed as dist

from lightning_multigpu.communication.shared_memory.barrier import Barrier
from tests.communication.shared import shared_memory
from tests.world import World, init_group

# Up to 2048 bytes four ranks sum everything themselves; a chunk holds 512 to 2048 elements, depending on the dtype.
NUMELS = [0, 1, 2, 3, 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049, 5000]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]


def contribution(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    if dtype in FLOATS:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-1000, 1000, (numel,), generator=generator).to(dtype)


def sum_in_rank_order(world_size: int, numel: int, dtype: torch.dtype, average: bool) -> torch.Tensor:
    """The very bits: summed in the dtype, or in float32 where it has 16 bits."""
    summed_in = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = contribution(0, numel, dtype).to(summed_in)
    for rank in range(1, world_size):
        total = total + contribution(rank, numel, dtype).to(summed_in)
    return (total / world_size if average else total).to(dtype)


CASES = [*((dtype, True) for dtype in FLOATS), (torch.float32, False), (torch.int32, False), (torch.int64, False)]


def _reduce() -> list[torch.Tensor]:
    results = []
    with shared_memory() as shared:
        for dtype, average in CASES:
            for numel in NUMELS:
                tensor = contribution(shared.rank, numel, dtype)
                assert shared(tensor, average=average) is tensor
                results.append(tensor)
    return results


def test_sums_in_rank_order_to_the_bit(world: World) -> None:
    wanted = [(numel, dtype, average) for dtype, average in CASES for numel in NUMELS]
    for results in world.run(_reduce):
        for given, result in zip(wanted, results, strict=True):
            assert torch.equal(result, sum_in_rank_order(world.num_ranks, *given)), given


def _one_rank_is_slow(slow_rank: int, where: str) -> list[torch.Tensor]:
    init_group()
    arrive = Barrier.arrive

    def slow_arrive(barrier: Barrier) -> None:
        if where == "before it has arrived":
            time.sleep(0.005)
        arrive(barrier)
        if where == "before it reads":
            time.sleep(0.005)

    if dist.get_rank() == slow_rank:
        Barrier.arrive = slow_arrive  # type: ignore[method-assign]
    try:
        with shared_memory() as shared:
            return [shared(torch.arange(5000) * (call + shared.rank)) for call in range(3)]
    finally:
        Barrier.arrive = arrive  # type: ignore[method-assign]


@pytest.mark.parametrize("where", ["before it has arrived", "before it reads"])
def test_fast_ranks_neither_read_too_early_nor_write_too_early(world: World, where: str) -> None:
    """A fast rank may be one interval ahead of a slow one that still reads: the third buffer is for that."""
    n = world.num_ranks
    for results in world.run(_one_rank_is_slow, n - 1, where):
        for call, result in enumerate(results):
            assert torch.equal(result, torch.arange(5000) * (n * call + n * (n - 1) // 2))
