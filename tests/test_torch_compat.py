"""What stands in for newer parts of torch gives the same on this version of torch as these parts do."""

from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_multigpu import _torch_compat
from lightning_multigpu._torch_compat import new_group_in_order
from tests.world import World, init_group, rank


def _groups_in_order(can_keep_order: bool) -> tuple[list[int], int, int, list[int]]:
    """This rank's group and place in it, the first rank's broadcast, and what the next rank of the group has sent."""
    init_group()
    me = dist.get_rank()
    with patch.object(_torch_compat, "CAN_KEEP_ORDER", can_keep_order):
        groups = [new_group_in_order(ranks) for ranks in ([3, 1], [0, 2], [2, 1, 3, 0])]
    group = groups[0 if me % 2 else 1]
    mine, size = dist.get_rank(group), dist.get_world_size(group)
    first = torch.tensor([me])
    dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
    everyone = [torch.tensor([-1]) for _ in range(4)]
    dist.all_gather(everyone, torch.tensor([me]), group=groups[2])
    ranks = dist.get_process_group_ranks(group)
    assert group.size() == size == 2
    assert group.rank() == mine
    return ranks, mine, int(first), [int(rank) for rank in everyone]


@pytest.mark.parametrize("can_keep_order", {_torch_compat.CAN_KEEP_ORDER, False})
def test_a_group_keeps_the_order_of_its_ranks(can_keep_order: bool, world4: World) -> None:
    """torch 2.11 sorts the ranks of each new group: every rank of a pipeline would have had another one's stage."""
    assert world4.run(_groups_in_order, can_keep_order) == [
        ([0, 2], 0, 0, [2, 1, 3, 0]),
        ([3, 1], 1, 3, [2, 1, 3, 0]),
        ([0, 2], 1, 0, [2, 1, 3, 0]),
        ([3, 1], 0, 3, [2, 1, 3, 0]),
    ]


def _joined_after_a_failed_attempt() -> int:
    if rank() == 1:
        limit = timedelta(seconds=0.2)
        with pytest.raises(RuntimeError):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=1, world_size=2, timeout=limit)
    _torch_compat.forget_failed_worlds()
    init_group()
    return dist.get_world_size()


def test_ranks_find_each_other_after_one_has_failed_to(world2: World) -> None:
    """They waited for each other in groups of different names for ever."""
    assert world2.run(_joined_after_a_failed_attempt) == [2, 2]


def test_transforms_of_torch_func_are_seen() -> None:
    """If this fails, torch has renamed what refuses torch.func under tensor_split and pipelines."""
    assert len(_torch_compat.ENTRANCES) == 2
    seen: list[bool] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch_compat.is_transformed())
        return x.sin().sum()

    note(torch.ones(2))
    for transform, (module, name) in zip((torch.func.grad, torch.func.vmap), _torch_compat.ENTRANCES, strict=True):
        with patch.object(module, name, wraps=getattr(module, name)) as entrance:
            transform(note)(torch.ones(2))
        assert entrance.called
    assert seen == [False, True, True]
