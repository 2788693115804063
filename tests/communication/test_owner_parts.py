"""Parts of flat tensors go to their owners, by a back end's collectives, as on GPUs, and in the hosts' memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.owner_parts import OwnerParts
from lightning_multigpu.communication.ring import RingAllReduce
from tests.world import World, init_group, rank

SHAPES = [(3, 2), (4,), (2, 2), (1,)]
OWNERS = [1, 0, 1, 1]


def moved(in_memory: bool) -> tuple[list[int], Tensor, Tensor, Tensor, dict[str, Any]]:
    """The numbers of this rank's tensors, their averages, all averages, the gathered values, and what was sent."""
    init_group()
    meter, group = Meter(), dist.new_group(backend="gloo")
    metered = MeteredGroup(group, meter, name="shards", device=torch.device("cpu"))
    parts = OwnerParts(metered, HierarchicalAllReduce(None, RingAllReduce(group)) if in_memory else None)
    tensors = [torch.full(shape, float(number)) for number, shape in enumerate(SHAPES)]
    bucket = parts.bucket(tensors, dict(zip(tensors, OWNERS, strict=True)))
    given = torch.cat([tensor.reshape(-1) for tensor in bucket.members]) + rank()
    own = parts.reduce(bucket, given.clone())()
    whole = parts.reduce(bucket, given.clone(), to_all=True)()
    values = torch.full_like(given, -1.0)
    values[bucket.own[1]] = given[bucket.own[1]]
    gathered = parts.gather(bucket, values)()
    parts.close()
    meter.end_step()
    meter.flush()
    sent = {total.operation: total.sent_bytes for total in meter.steps[0].operations}
    return [int(tensor.flatten()[0]) for tensor in bucket.own[0]], own, whole, gathered, sent


@pytest.mark.parametrize("in_memory", [False, True], ids=["back end", "hosts' memory"])
def test_sums_go_to_the_owners_and_values_to_all(in_memory: bool, world2: World) -> None:
    numbers = torch.tensor([1.0] * 4 + [0.0] * 6 + [2.0] * 4 + [3.0])  # those of rank 0 first
    for of_rank, (held, own, whole, gathered, sent) in enumerate(world2.run(moved, in_memory)):
        assert held == ([1], [0, 2, 3])[of_rank]
        assert own.tolist() == ((numbers + 0.5)[:4], (numbers + 0.5)[4:])[of_rank].tolist()
        assert whole.tolist() == (numbers + 0.5).tolist()
        assert gathered.tolist() == (numbers + torch.tensor([0.0] * 4 + [1.0] * 11)).tolist()
        names = ("reduce_scatter", "all_gather") if in_memory else ("reduce", "broadcast")
        of_other, of_own = ((44, 16), (16, 44))[of_rank]
        assert [sent[name] for name in names] == [of_other, of_own]
