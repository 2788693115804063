"""Two hosts of two ranks each, played by four processes: sums, bytes, and nothing lost by compression."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.compression import CompressedAllReduce
from lightning_multigpu.communication.compression.compressors import Int8
from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce
from lightning_multigpu.communication.ring import DEFAULT_SEGMENT_BYTES, RingAllReduce, chunk_bounds
from lightning_multigpu.communication.shared_memory.host_all_reduce import SharedMemoryAllReduce
from tests.communication.shared import own_errors
from tests.world import World, init_group, rank

NUMEL = 1257
HOSTS = [[0, 1], [2, 3]]
BITS = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 1e-15}


def _own(lines: list[list[int]]) -> dist.ProcessGroup:
    groups = [dist.new_group(line, backend="gloo") for line in lines]
    return next(group for group, line in zip(groups, lines, strict=True) if rank() in line)


@contextmanager
def hierarchy(
    *, compressed: bool = False, hosts: list[list[int]] = HOSTS, segment_bytes: int = DEFAULT_SEGMENT_BYTES
) -> Iterator[HierarchicalAllReduce]:
    """Over four ranks; one host of four, or four hosts of one, are hierarchies as well."""
    init_group()
    inside = SharedMemoryAllReduce(_own(hosts)) if len(hosts[0]) > 1 else None
    between: RingAllReduce | CompressedAllReduce | None = None
    if len(hosts) > 1:
        group = _own([list(line) for line in zip(*hosts, strict=True)])
        coded = compressed and CompressedAllReduce(group, Int8(chunk_size=32), segment_elements=100)
        between = coded or RingAllReduce(group, segment_bytes=segment_bytes)
    reduce = HierarchicalAllReduce(inside, between)
    try:
        yield reduce
    finally:
        dist.barrier()
        reduce.close()


def given(step: int, of_rank: int, numel: int = NUMEL, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + of_rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


SIZES = (0, 1, 2, 3, 4, 1000, 300_001)
OTHER_LAYOUTS = [[[0, 1, 2, 3]], [[0], [1], [2], [3]]]


def _sums(hosts: list[list[int]], dtype: torch.dtype, average: bool) -> list[tuple[Tensor, int, int]]:
    found = []
    with hierarchy(hosts=hosts) as reduce:
        for numel in SIZES:
            tensor = given(0, rank(), numel, dtype)
            sent = reduce.plan(tensor).sent
            assert reduce(tensor, average=average) is tensor
            found.append((tensor, *sent))
    return found


@pytest.mark.parametrize(
    ("hosts", "dtype"),
    [*((HOSTS, dtype) for dtype in BITS), *((hosts, torch.float32) for hosts in OTHER_LAYOUTS)],
    ids=str,
)
def test_sums_are_those_of_all_ranks_to_the_same_bit(world4: World, hosts: list[list[int]], dtype: torch.dtype) -> None:
    """Each host sends each byte once, whatever its ranks: 2(n-1)/n of the tensor, and for n = 2 that is the tensor."""
    for average in (False, True):
        results = world4.run(_sums, hosts, dtype, average)
        for index, numel in enumerate(SIZES):
            tensors = [result[index][0] for result in results]
            assert all(torch.equal(tensors[0], other) for other in tensors)
            expected = torch.stack([given(0, r, numel, dtype).double() for r in range(4)]).sum(0)
            expected = expected / 4 if average else expected
            torch.testing.assert_close(tensors[0].double(), expected, rtol=BITS[dtype], atol=4 * BITS[dtype])
            for host in hosts if hosts == HOSTS else ():
                size_bytes = dtype.itemsize * numel
                assert sum(results[r][index][1] for r in host) == size_bytes
                assert sum(results[r][index][2] for r in host) == size_bytes * len(host)


PARTS = [[5000, 3, 0, 900], [0, 0, 7000, 0], [1, 2, 3, 4]]
"""Elements of each rank."""


def _parts(hosts: list[list[int]]) -> list[tuple[int, Tensor, Tensor, tuple[Any, Any]]]:
    """Of each of the ``PARTS``: the place of this rank's part, its averages, all parts gathered, and what was sent."""
    found = []
    with hierarchy(hosts=hosts, segment_bytes=1000) as reduce:
        for sizes in PARTS:
            ends = [0, *accumulate(sizes[each] for each in reduce.order)]
            bounds = [*pairwise(ends)]
            start, end = bounds[reduce.order.index(rank())]
            flat = given(0, rank(), ends[-1])
            reduce.reduce_scatter(flat, bounds, average=True)
            own, flat = flat[start:end].clone(), torch.full_like(flat, rank())
            reduce.all_gather(flat, bounds)
            found.append((start, own, flat, reduce.sent_parts(bounds, 4)))
    return found


@pytest.mark.parametrize("hosts", [HOSTS, *OTHER_LAYOUTS], ids=str)
def test_parts_go_to_their_owners_and_back(world4: World, hosts: list[list[int]]) -> None:
    results = world4.run(_parts, hosts)
    order = [host[local] for local in range(len(hosts[0])) for host in hosts]
    for index, sizes in enumerate(PARTS):
        numel = sum(sizes)
        mean = torch.stack([given(0, r, numel) for r in range(4)]).mean(0)
        gathered = torch.cat([torch.full((sizes[each],), float(each)) for each in order])
        for found in results:
            start, own, flat, _ = found[index]
            torch.testing.assert_close(own, mean[start : start + len(own)], rtol=1e-6, atol=1e-6)
            assert torch.equal(flat, gathered)
        for phase in range(2):
            network, memory = (sum(found[index][3][phase][kind] for found in results) for kind in range(2))
            assert network == 4 * numel * (len(hosts) - 1), "each host sends each part once, but its own"
            assert memory == (4 * numel * len(hosts) * (1 if phase else len(hosts[0]) - 1) if len(hosts[0]) > 1 else 0)


def _kept(reduce: HierarchicalAllReduce, num_hosts: int = 2) -> Tensor:
    """The mean of the hosts' errors, of which each rank has those of its own part."""
    assert reduce.compressed is not None
    start, end = (
        (0, NUMEL) if reduce.inside is None else chunk_bounds(NUMEL, reduce.inside.world_size)[reduce.inside.rank]
    )
    total = torch.zeros(NUMEL)
    total[start:end] = own_errors(reduce.compressed, "a")
    dist.all_reduce(total)
    return total / num_hosts


def _train(steps: range, hosts: list[list[int]] = HOSTS, nan_at: int = -1) -> Any:
    """The sum of the results of all steps, the errors behind the last one, and the results."""
    with hierarchy(compressed=True, hosts=hosts) as reduce:
        total = torch.zeros(NUMEL)
        results = []
        for step in steps:
            tensor = given(step, rank())
            if step == nan_at and rank() == 3:
                tensor[-1] = float("nan")  # in the shard of the second rank of each host
            reduce(tensor, "a", average=True)
            reduce.end_step()
            results.append(tensor)
            if step != nan_at:
                total += tensor
        assert reduce.compressed is not None
        assert reduce.compressed.step == len(steps) - (nan_at in steps)
        return total, _kept(reduce, len(hosts)), results


@pytest.mark.parametrize("hosts", [HOSTS, OTHER_LAYOUTS[1]], ids=["hosts", "ranks"])
def test_what_was_sent_and_what_is_kept_is_what_was_given(world4: World, hosts: list[list[int]]) -> None:
    found = world4.run(_train, range(6), hosts)
    expected = torch.stack([given(step, r) for step in range(6) for r in range(4)]).sum(0) / 4
    for total, kept, results in found:
        torch.testing.assert_close(total + kept, expected, rtol=1e-4, atol=1e-4)
        assert all(torch.equal(a, b) for a, b in zip(results, found[0][2], strict=True))
        assert kept.abs().max() > 1e-3, "else nothing was compressed"


def test_a_step_that_is_not_finite_in_one_shard_leaves_the_errors_of_all(world4: World) -> None:
    before = world4.run(_train, range(3))
    after = world4.run(_train, range(4), HOSTS, 3)
    for (_, errors, _), (_, kept, results) in zip(before, after, strict=True):
        assert not results[3].isfinite().all(), "loss scaling must see it"
        assert torch.equal(errors, kept)


def test_lossless_tensors_pass_a_compressing_hierarchy(world4: World) -> None:
    for tensor in world4.run(_without_a_key):
        expected = torch.stack([given(0, r) for r in range(4)]).mean(0)
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-6)


def _without_a_key() -> Tensor:
    with hierarchy(compressed=True) as reduce:
        return reduce(given(0, rank()), average=True)
