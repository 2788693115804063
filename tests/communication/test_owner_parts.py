"""Parts of flat tensors go to their owners, by a back end's collectives, as on GPUs, and in the hosts' memory."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication import owner_parts
from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.owner_parts import OwnerParts
from lightning_multigpu.communication.ring import RingAllReduce
from lightning_multigpu.communication.shared_memory.host_all_reduce import SharedMemoryAllReduce
from tests.world import World, init_group, rank

SHAPES = [(3, 2), (4,), (2, 2), (1,)]
OWNERS = [1, 0, 1, 1]


def moved(route: str, large_bytes: int) -> tuple[list[int], list[int], list[Tensor], dict[str, Any]]:
    """The numbers of all tensors and of this rank's, averages of its own and of all, gathered values, what was sent."""
    init_group()
    meter, group = Meter(), dist.new_group(backend="gloo")
    metered = MeteredGroup(group, meter, name="shards", device=torch.device("cpu"))
    inside, between = route == "one host", route == "hosts"
    all_reduce = HierarchicalAllReduce(
        SharedMemoryAllReduce(group) if inside else None, RingAllReduce(group) if between else None
    )
    parts = OwnerParts(metered, all_reduce if inside or between else None)
    tensors = [torch.full(shape, float(number)) for number, shape in enumerate(SHAPES)]
    tensors[0] = tensors[0].T.contiguous().T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner_parts, "_LARGE_BYTES", large_bytes)
        bucket = parts.bucket(tensors, dict(zip(tensors, OWNERS, strict=True)))
        numbers, own = ([int(tensor.flatten()[0]) for tensor in of] for of in (bucket.members, bucket.own[0]))
        given = [tensor + rank() for tensor in bucket.members]
        averages = parts.reduce(bucket, given)()
        of_all = parts.reduce(bucket, given, to_all=True, is_last=True)()
        for tensor in tensors:
            tensor.add_(10.0 * (1 + rank()))
        parts.gather(bucket)()
    parts.close()
    meter.end_step()
    meter.flush()
    sent = {total.operation: total.sent_bytes for total in meter.steps[0].operations}
    return numbers, own, [averages, of_all, *tensors], sent


@pytest.mark.parametrize("large_bytes", [1000, 15])
@pytest.mark.parametrize("route", ["back end", "hosts", "one host"])
def test_sums_go_to_the_owners_and_values_to_all(route: str, large_bytes: int, world2: World) -> None:
    order = [1, 0, 2, 3] if large_bytes == 1000 else [1, 3, 0, 2]  # those of rank 0 first, and of a rank small ones
    for of_rank, found in enumerate(world2.run(moved, route, large_bytes)):
        numbers, own, (averages, of_all, *gathered), sent = found
        assert numbers == order
        assert own == [number for number in order if OWNERS[number] == of_rank]
        for tensor, of in ((averages, own), (of_all, order)):
            expected = [number + 0.5 for number in of for _ in range(torch.Size(SHAPES[number]).numel())]
            assert tensor.tolist() == expected
        for number, (tensor, owner) in enumerate(zip(gathered, OWNERS, strict=True)):
            assert torch.equal(tensor, torch.full(SHAPES[number], number + 10.0 * (1 + owner)))
        names = ("reduce", "broadcast") if route == "back end" else ("reduce_scatter", "all_gather")
        of_other, of_own = ((44, 16), (16, 44))[of_rank]
        assert [sent[name] for name in names] == [of_other, of_own]
