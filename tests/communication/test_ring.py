"""The ring: its schedule as a pure function, then its sums on real ranks."""

import pytest
import torch
import torch.distributed as dist

from lightning_multigpu.communication.ring import RingAllReduce, chunk_bounds, ring_steps, sent_elements
from tests.world import World, init_group


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_schedule_sums_every_chunk_on_every_rank(world_size: int) -> None:
    """Simulates the ring with sets of contributions: at the end every rank must hold all of every chunk."""
    held = [[{rank} for _ in range(world_size)] for rank in range(world_size)]
    schedules = [list(ring_steps(rank, world_size)) for rank in range(world_size)]
    for step in range(2 * (world_size - 1)):
        sent = [set(held[rank][schedules[rank][step].send]) for rank in range(world_size)]
        for rank in range(world_size):
            mine = schedules[rank][step]
            arriving = sent[(rank - 1) % world_size]
            assert schedules[(rank - 1) % world_size][step].send == mine.receive
            if mine.phase == "reduce":
                assert not held[rank][mine.receive] & arriving, "a contribution would be counted twice"
                held[rank][mine.receive] |= arriving
            else:
                held[rank][mine.receive] = arriving
    everyone = set(range(world_size))
    assert all(chunk == everyone for chunks in held for chunk in chunks)


@pytest.mark.parametrize(("numel", "num_chunks"), [(0, 3), (1, 3), (7, 3), (9, 3), (1000, 7)])
def test_chunks_cover_everything_once(numel: int, num_chunks: int) -> None:
    bounds = chunk_bounds(numel, num_chunks)
    assert [i for a, b in bounds for i in range(a, b)] == list(range(numel))
    sizes = [b - a for a, b in bounds]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_bytes_are_those_of_the_formula(world_size: int) -> None:
    numel = 24 * world_size
    assert all(sent_elements(numel, rank, world_size) * world_size == 2 * (world_size - 1) * numel
               for rank in range(world_size))  # fmt: skip
    odd = numel + 1
    assert sum(sent_elements(odd, rank, world_size) for rank in range(world_size)) == 2 * (world_size - 1) * odd


def _reduce(numel: int, dtype: torch.dtype, average: bool, segment_bytes: int) -> torch.Tensor:
    init_group()
    rank = dist.get_rank()
    group = dist.new_group(backend="gloo")
    tensor = (torch.arange(numel) % 13 + rank + 1).to(dtype)
    result = RingAllReduce(group, segment_bytes=segment_bytes)(tensor, average=average)
    assert result is tensor
    dist.destroy_process_group(group)
    return result


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64)


def _sums() -> list[torch.Tensor]:
    return [_reduce(numel, dtype, False, 1 << 20) for numel in (1, 3, 1000) for dtype in DTYPES]


def test_sums_over_four_ranks(world4: World) -> None:
    expected = [
        (4 * (torch.arange(numel) % 13) + 1 + 2 + 3 + 4).to(dtype) for numel in (1, 3, 1000) for dtype in DTYPES
    ]
    for sums in world4.run(_sums):
        torch.testing.assert_close(sums, expected, rtol=0, atol=0)


def test_segments_of_any_size(world2: World) -> None:
    expected = (torch.arange(301) % 13).double() + 1.5
    for results in world2.run(lambda: [_reduce(301, torch.float64, True, size) for size in (1, 8, 100, 1 << 20)]):
        torch.testing.assert_close(results, [expected] * 4, rtol=0, atol=0)


def _overlapping(odd_ranks_too: bool) -> bool:
    """Even ranks begin with the next tensor before they finish the one before."""
    init_group()
    rank, n = dist.get_rank(), dist.get_world_size()
    ring = RingAllReduce(dist.new_group(backend="gloo"), segment_bytes=400)
    numels = [1000, 3000, 7, 2000, 1, 5000, 4000]
    tensors = [torch.arange(numel, dtype=torch.float64) * (rank + 1) + call for call, numel in enumerate(numels)]
    pending = None
    for tensor in tensors:
        begun = ring.begin(tensor)
        if pending is not None:
            pending()
        pending = begun
        if rank % 2 and not odd_ranks_too:
            pending()
            pending = None
    if pending is not None:
        pending()
    sums = [torch.arange(numel) * (n * (n + 1) / 2) + n * call for call, numel in enumerate(numels)]
    return all(torch.equal(tensor, expected) for tensor, expected in zip(tensors, sums, strict=True))


def test_one_tensor_may_begin_before_the_one_before_it_ends(world: World) -> None:
    assert all(world.run(lambda: _overlapping(True) and _overlapping(False)))
