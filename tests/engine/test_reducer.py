"""The reducer on one host: the same gradients through shared memory as around the ring, and a way out of both."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_multigpu.communication.compression import CompressedAllReduce, make_compressor
from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.shared_memory.barrier import ConnectionLostError
from lightning_multigpu.communication.shared_memory.host_all_reduce import SharedMemoryAllReduce
from lightning_multigpu.engine.data_parallel.reducer import GradientReducer
from tests.world import World, init_group


@contextlib.contextmanager
def reducer(meter: Meter, *, one_host: bool) -> Iterator[GradientReducer]:
    init_group()
    group = dist.new_group(backend="gloo")
    shared = HierarchicalAllReduce(SharedMemoryAllReduce(group), None) if one_host else None
    found = GradientReducer(group, meter, all_reduce=shared)
    try:
        yield found
    finally:
        found.close()
        dist.destroy_process_group(group)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 3)).double()


def gradients(module: nn.Module, step: int, rank: int, finish: Callable[[], None] = lambda: None) -> list[Tensor]:
    torch.manual_seed(10 * step + rank)
    module.zero_grad()
    module(torch.randn(7, 100, dtype=torch.float64)).square().sum().backward()
    finish()
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


def averaged_gradients(one_host: bool) -> tuple[list[Tensor], list[int]]:
    """Gradients of two backward passes, and the bytes that this rank sent in each."""
    meter = Meter()
    found: list[Tensor] = []
    with reducer(meter, one_host=one_host) as reduce:
        module = DistributedDataParallel(model(), bucket_cap_mb=0.01)
        reduce.attach(module)
        for step in range(2):
            found += gradients(module, step, dist.get_rank(), reduce.finish)
            meter.end_step()
    return found, [step.sent_bytes for step in meter.steps]


@pytest.mark.parametrize("one_host", [True, False], ids=["shared memory", "ring"])
def test_gradients_are_averaged_and_their_bytes_counted(world4: World, one_host: bool) -> None:
    size_bytes = 8 * (100 * 100 + 100 + 100 * 3 + 3)
    wanted = [
        torch.stack(each).mean(0)
        for step in range(2)
        for each in zip(*(gradients(model(), step, rank) for rank in range(4)), strict=True)
    ]
    results = world4.run(averaged_gradients, one_host)
    for found, _ in results:
        for gradient, average, first in zip(found, wanted, results[0][0], strict=True):
            torch.testing.assert_close(gradient, average, rtol=1e-12, atol=1e-12)
            assert torch.equal(gradient, first)
    # Each rank writes its gradients once; around the ring all ranks together send 2(N-1) times their size.
    per_step = 4 * size_bytes if one_host else 6 * size_bytes
    assert [sum(step) for step in zip(*(sent for _, sent in results), strict=True)] == [per_step, per_step]


def keys_of_compression() -> list[tuple[int, int]]:
    """Elements of each bucket that is planned within three steps, and of the parameters in its key."""
    found: list[tuple[int, int]] = []
    init_group()
    group = dist.new_group(backend="gloo")
    all_reduce = HierarchicalAllReduce(None, CompressedAllReduce(group, make_compressor("int8")))
    reduce, module = GradientReducer(group, Meter(), all_reduce=all_reduce), DistributedDataParallel(model())
    sizes, plan = {id(parameter): parameter.numel() for parameter in module.parameters()}, all_reduce.plan

    def noted(tensor: Tensor, key: Any = None, **options: Any) -> Any:
        found.append((tensor.numel(), sum(sizes[each] for each in key)))
        return plan(tensor, key, **options)

    all_reduce.plan = noted  # type: ignore[method-assign]
    reduce.attach(module)
    for step in range(3):
        gradients(module, step, dist.get_rank(), reduce.finish)
    reduce.close()
    return found


def test_errors_of_compression_belong_to_the_parameters_of_a_bucket(world2: World) -> None:
    """torch arranges buckets anew after the first step: errors by the number of a bucket came to other parameters."""
    for found in world2.run(keys_of_compression):
        assert len(found) == 2, "for the first step, and for those after it"
        assert all(in_bucket == in_key for in_bucket, in_key in found)


def moves_by_step() -> list[int]:
    """How often a bucket was moved into shared memory in each of four steps; detached, none stays there."""
    moved: list[Tensor] = []
    with reducer(Meter(), one_host=True) as reduce, pytest.MonkeyPatch.context() as patch:
        move = SharedMemoryAllReduce.move
        patch.setattr(SharedMemoryAllReduce, "move", lambda *arguments: (move(*arguments), moved.append(arguments[1])))
        layers = [nn.Linear(100, 100) for _ in range(3)]
        module = DistributedDataParallel(nn.Sequential(*layers).double(), bucket_cap_mb=0.01)
        reduce.attach(module)
        counts = []
        for step in range(4):
            gradients(module, step, dist.get_rank(), reduce.finish)
            counts.append(len(moved))
            places = {each.place[0] for each in reduce._buckets.values()}
            assert places <= {tensor.data_ptr() for tensor in moved}, "a freed place may become another bucket's"
        assert reduce.all_reduce is not None
        assert isinstance(inside := reduce.all_reduce.inside, SharedMemoryAllReduce)
        assert any(map(inside.has_moved, moved))
        reduce.detach()
        assert not any(map(inside.has_moved, moved))
    return [after - before for before, after in zip([0, *counts], counts, strict=False)]


def test_each_bucket_moves_once(world2: World) -> None:
    """torch has one bucket in the first step, and arranges them anew in the order in which gradients came in it."""
    for first, second, *others in world2.run(moves_by_step):
        assert (first, second) == (1, 3)
        assert others == [0, 0]


def aborted() -> None:
    with reducer(Meter(), one_host=True) as reduce:
        if dist.get_rank() == 0:
            module = DistributedDataParallel(nn.Linear(3, 3), process_group=dist.new_group([0], backend="gloo"))
            reduce.attach(module)
            assert reduce.all_reduce is not None
            reduce.all_reduce.abort()
            module(torch.ones(2, 3)).sum().backward()
            with pytest.raises(ConnectionLostError, match="aborted"):
                reduce.finish()
        else:
            dist.new_group([0], backend="gloo")
        dist.barrier()


def test_abort_ends_a_reduction_that_another_rank_never_joins(world2: World) -> None:
    world2.run(aborted, timeout_s=20)
