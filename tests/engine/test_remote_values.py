"""Tensors of other ranks come when a checkpoint is written, and make the file that they would make here."""

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_multigpu._torch_compat import new_group_in_order
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.communication.point_to_point import PointToPointGroup
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.remote_values import RemoteTensor, RemoteValues
from tests.world import World, init_group

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint16, torch.float8_e4m3fn)


def written(values: Any) -> bytes:
    file = io.BytesIO()
    torch.save(values, file)
    return file.getvalue()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_file_is_that_of_the_values(dtype: torch.dtype) -> None:
    values = torch.arange(6).reshape(2, 3).to(dtype)
    own, remote = torch.ones(4), RemoteTensor(values.to("meta"), "weight", lambda: values)
    assert written({"here": own, "there": remote}) == written({"here": own, "there": values})


def test_values_that_do_not_lie_in_order() -> None:
    values = torch.arange(6.0).reshape(2, 3).t()
    remote = RemoteTensor(values, "weight", lambda: values.contiguous())
    assert written(remote) == written(values.contiguous())


def test_values_cannot_be_looked_at() -> None:
    with pytest.raises(PipelineError, match=r"computes with layers\.0\.weight, whose values are on another rank"):
        float(RemoteTensor(torch.empty(1), "layers.0.weight", lambda: torch.ones(1)))


def served(fails: bool) -> Any:
    """Two rounds: what the last position, rank 0, fetches in the first, and in the second."""
    init_group()
    group = PointToPointGroup(new_group_in_order([1, 0]), Meter(), torch.device("cpu"), name="values")
    position = dist.get_rank(group.process_group)
    remote, found = RemoteValues(group, position), []
    for number in (1.0, 2.0):
        value = torch.full((3,), number)
        keys = [remote.offer(value), remote.offer(10 * value)] if position == 0 else [0, 1]
        try:
            with remote.served():
                if position == 1:
                    tensors = [remote.remote(value.to("meta"), key, 0, "weight") for key in keys]
                    found.append([tensor.fetch().tolist() for tensor in tensors[: 1 if fails else 2]])
                    if fails:
                        raise OSError("the disk is full")
        except OSError:
            found.append(["full"])
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_serves_until_the_last_one_has_all_or_fails(fails: bool, world2: World) -> None:
    """Where the last rank cannot write, the others go on to where they learn of it."""
    last, first = world2.run(served, fails)
    assert first == []
    one, two = [[1.0] * 3, [10.0] * 3], [[2.0] * 3, [20.0] * 3]
    assert last == ([one[:1], ["full"], two[:1], ["full"]] if fails else [one, two])
