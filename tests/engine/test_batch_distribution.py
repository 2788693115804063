"""How global batches are dealt out: every sample once, in the order that one device has."""

import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
)

from lightning_multigpu.engine.data_parallel.batch_distribution import (
    CountedBatchSampler,
    ShardedBatchSampler,
    distribute_batches,
    global_batches,
)

sampler_of: Any = DistributedSampler
loader_of: Any = DataLoader


def _samplers(length: int, batch_size: int, num_replicas: int, drop_last: bool = False, **options: Any) -> Any:
    batches = BatchSampler(range(length), batch_size, drop_last)
    return [ShardedBatchSampler(batches, num_replicas=num_replicas, rank=r, **options) for r in range(num_replicas)]


def test_ranks_together_see_the_batches_of_one_device() -> None:
    assert [[*each] for each in _samplers(11, 2, 2)] == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]
    assert [[*each] for each in _samplers(11, 2, 2, drop_last=True)] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_a_rank_without_a_sample_gets_one_that_does_not_count() -> None:
    samplers = _samplers(9, 2, 4)
    assert [[*sampler][1:] for sampler in samplers] == [[[8]]] * 4
    assert [list(sampler.counts) for sampler in samplers] == [[2, 1], [2, 0], [2, 0], [2, 0]]


@pytest.mark.filterwarnings("ignore:. data ranks evaluate fewer samples")
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 10, 16, 17, 23])
@pytest.mark.parametrize(("batch_size", "num_replicas"), [(1, 2), (2, 2), (4, 2), (2, 4), (3, 3)])
def test_outside_training_no_sample_is_repeated(length: int, batch_size: int, num_replicas: int) -> None:
    ranks = [[*sampler] for sampler in _samplers(length, batch_size, num_replicas, even=True)]
    seen = [index for rank in ranks for batch in rank for index in batch]
    if length >= num_replicas:
        assert sorted(seen) == list(range(length))
    assert set(seen) == set(range(length))
    assert all(rank and all(0 < len(batch) <= batch_size for batch in rank) for rank in ranks)
    if batch_size > 1 and length >= 2 * num_replicas:
        assert len({len(rank) for rank in ranks}) == 1, "every rank has as many batches"


def test_global_batches_borrow_for_a_last_one_that_is_too_small() -> None:
    assert global_batches(9, 4, num_replicas=2, drop_last=False) == [0, 4, 7, 9]
    assert global_batches(9, 4, num_replicas=0, drop_last=False) == [0, 4, 8, 9]
    assert global_batches(8, 4, num_replicas=2, drop_last=False) == [0, 4, 8]
    assert global_batches(3, 4, num_replicas=4, drop_last=True) == [0]


def test_skipping_leaves_batches_out_once() -> None:
    sampler = _samplers(12, 2, 2)[1]
    sampler.skip = 2
    assert list(sampler) == [[10, 11]]
    assert list(sampler.counts) == [2]
    assert len(list(sampler)) == 3
    plain = CountedBatchSampler(BatchSampler(SequentialSampler(range(7)), 3, drop_last=False))
    plain.skip = 1
    assert list(plain) == [[3, 4, 5], [6]]
    assert (list(plain.counts), len(plain), plain.batch_size) == ([3, 1], 3, 3)


def _injected(num_replicas: int, rank: int, shuffle: bool, num_workers: int = 0) -> DataLoader[int]:
    data = range(10)
    sampler = sampler_of(data, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=3)
    return loader_of(data, batch_size=2, sampler=sampler, num_workers=num_workers)  # type: ignore[no-any-return]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_distributed_sampler_is_dealt_out_without_repeats(num_workers: int) -> None:
    batches = []
    for rank in range(2):
        given = _injected(2, rank, True, num_workers)
        before = given.batch_sampler
        loader, dealt = distribute_batches(given, num_replicas=2, rank=rank, even=False)
        assert given.batch_sampler is before
        assert given.sampler.num_replicas == 2  # type: ignore[attr-defined]
        assert dealt is not None
        loader.batch_sampler.sampler.set_epoch(1)
        batches.append([batch.tolist() for batch in loader])
        assert list(dealt.counts) == [2, 2, 1]
    whole = sampler_of(range(10), num_replicas=1, rank=0, shuffle=True, seed=3)
    whole.set_epoch(1)
    order = list(whole)
    assert [a + b for a, b in zip(*batches, strict=True)] == [order[0:4], order[4:8], order[8:10]]


def test_a_sampler_that_draws_from_the_global_generators_gives_all_ranks_one_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank drew an order of its own, and an epoch repeated some samples and left others out.

    ``torch.manual_seed`` seeds GPUs too: all ranks would drop the same values from each epoch's start on.
    """
    of_gpus: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", of_gpus.append)

    class Mixed(SubsetRandomSampler):
        def __iter__(self) -> Iterator[int]:
            drawn = random.sample(list(super().__iter__()), len(self))
            return iter(numpy.random.permutation(drawn).tolist())

    orders = []
    for rank in range(2):
        torch.manual_seed(rank)
        random.seed(rank)
        numpy.random.seed(rank)
        before = torch.get_rng_state(), random.getstate()
        sampler = DistributedSamplerWrapper(Mixed(range(10)), num_replicas=2, rank=rank, shuffle=False)
        loader = loader_of(range(10), batch_size=2, sampler=sampler)
        loader = distribute_batches(loader, num_replicas=2, rank=rank, even=False)[0]
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            orders.append([index for batch in loader.batch_sampler for index in batch])
        assert before[0].equal(torch.get_rng_state())
        assert before[1] == random.getstate()
    assert sorted(orders[0] + orders[2]) == sorted(orders[1] + orders[3]) == list(range(10))
    assert orders[0] != orders[1]
    assert of_gpus == [0, 1], "those of this test"


class _Pairs(BatchSampler):
    """Draws its batches from its sampler, not those of the length that BatchSampler draws."""

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        yield from (order[i : i + 2] for i in range(0, len(order), 2))

    def __len__(self) -> int:
        return -(-len(self.sampler) // 2)  # type: ignore[arg-type]


class _Endless(_Pairs):
    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from super().__iter__()


class DrawnWhenMade(_Pairs):
    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.drawn = list(super().__iter__())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.drawn)


class _Stateful(DataLoader[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}


def _of_kind(kind: str, data: Any, sampler: Any) -> DataLoader[Any]:
    if kind == "whole batches":
        return DataLoader(data, batch_size=None, sampler=sampler)
    if kind == "with a state":
        return _Stateful(data, batch_size=2, sampler=sampler)
    kinds = {"subclass": _Pairs, "endless": _Endless, "drawn": DrawnWhenMade}
    return DataLoader(data, batch_sampler=kinds[kind](sampler, 2, False))


@pytest.mark.parametrize("kind", ["whole batches", "subclass", "endless", "with a state"])
@pytest.mark.parametrize("num_replicas", [2, 4])
@pytest.mark.parametrize("length", [8, 9, 10, 13, 17])
@pytest.mark.parametrize("even", [True, False])
def test_loaders_of_other_kinds_repeat_no_sample(kind: str, num_replicas: int, length: int, even: bool) -> None:
    """The padding of Lightning's sampler stayed in them: with 2 ranks 17 samples became 18, and 5 batches 6.

    An endless sampler was drawn from until the memory was full.
    """
    data = torch.arange(length)
    batches = BatchSampler(SequentialSampler(range(length)), 2, False)  # type: ignore[arg-type]
    seen = []
    for rank in range(num_replicas):
        if kind == "whole batches":
            sampler: Any = DistributedSamplerWrapper(batches, num_replicas=num_replicas, rank=rank, shuffle=False)
        else:
            sampler = sampler_of(data, num_replicas=num_replicas, rank=rank, shuffle=False)
        loader = _of_kind(kind, data, sampler)
        loader, dealt = distribute_batches(loader, num_replicas=num_replicas, rank=rank, even=even)
        assert dealt is not None
        loaded = list(loader)
        assert len(loaded) in ({len(loader)} if not even else {len(loader), len(loader) - 1})
        assert all(len(batch) for batch in loaded)
        seen += [i for batch, size in zip(loaded, dealt.counts, strict=True) for i in batch.tolist()[:size]]
        assert not even or all(dealt.counts)
    assert sorted(seen) == list(range(length))


@pytest.mark.parametrize(("batch_size", "lacking"), [(1, 3), (None, 1)], ids=["plain", "whole batches"])
def test_samples_that_are_too_few_for_the_ranks_are_said_to_be_seen_twice(batch_size: int | None, lacking: int) -> None:
    """A rank without one evaluated another rank's, in silence."""
    data = torch.arange(3) if batch_size else [torch.arange(2)] * 3
    for rank in range(4):
        sampler = sampler_of(data, num_replicas=4, rank=rank, shuffle=False)
        loader = loader_of(data, batch_size=batch_size, sampler=sampler)
        loader, dealt = distribute_batches(loader, num_replicas=4, rank=rank, even=True)
        words = "4 data ranks evaluate fewer samples, or fewer items that are not divided, than they are"
        with pytest.warns(UserWarning, match=words) if rank == lacking else nullcontext():
            assert len(list(loader)) == 1
        assert dealt is not None
        assert list(dealt.counts) == [int(rank != lacking)]


def test_a_batch_sampler_that_has_drawn_keeps_the_batches_of_its_rank() -> None:
    data = torch.arange(8)
    for rank in range(2):
        loader = _of_kind("drawn", data, sampler_of(data, num_replicas=2, rank=rank, shuffle=False))
        loader, _ = distribute_batches(loader, num_replicas=2, rank=rank, even=False)
        assert torch.cat(list(loader)).tolist() == list(range(rank, 8, 2))


@pytest.mark.parametrize(("limit", "first"), [(2, [4, 4]), (0.7, [4, 4]), (3, [4, 3]), (1.0, [4, 3])])
def test_a_batch_before_the_limit_keeps_its_samples(limit: float, first: list[int]) -> None:
    """With ``limit_val_batches`` the last batch, which was left out, still took samples from the batch before it."""
    batches = [[len(batch) for batch in sampler] for sampler in _samplers(9, 2, 2, even=True, limit=limit)]
    assert [sum(sizes) for sizes in zip(*batches, strict=True)][:2] == first


def test_what_is_not_ours_to_deal_is_left_alone() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(range(3))

    for loader in (loader_of(Stream()), [1, 2], loader_of(range(3), batch_size=None)):
        assert distribute_batches(loader, num_replicas=2, rank=0, even=False) == (loader, None)
    whole, elsewhere = loader_of(torch.arange(6), batch_size=2), _injected(3, 2, False)
    for loader, expected in ((whole, [[0, 1], [2, 3], [4, 5]]), (elsewhere, [b.tolist() for b in elsewhere])):
        dealt, batches = distribute_batches(loader, num_replicas=2, rank=1, even=False)
        assert [batch.tolist() for batch in dealt] == expected
        assert batches is not None
