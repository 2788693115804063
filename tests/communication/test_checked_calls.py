"""Collectives that Lightning asks for: all ranks have to make the same call."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.job.process_groups import metered_group
from tests.world import World, init_group


def group() -> MeteredGroup:
    init_group()
    assert dist.group.WORLD is not None
    return metered_group(dist.group.WORLD, Meter(), "world", torch.device("cpu"))


CALLS = {
    "gather 2": lambda ranks: ranks.all_gather(torch.arange(2)),
    "gather 1": lambda ranks: ranks.all_gather(torch.arange(1)),
    "gather many": lambda ranks: ranks.all_gather(torch.zeros(100)),
    "reduce": lambda ranks: ranks.all_reduce(torch.tensor(1.0), "mean", checked="reduce (mean)"),
    "reduce max": lambda ranks: ranks.all_reduce(torch.tensor(1.0), "max", checked="reduce (max)"),
    "reduce many": lambda ranks: ranks.all_reduce(torch.zeros(100), "mean", checked="reduce (mean)"),
    "barrier": lambda ranks: ranks.barrier(),
    "broadcast": lambda ranks: ranks.broadcast_object("x", 0),
    "objects": lambda ranks: ranks.gather_objects(None),
}


def call_own(*names: str) -> None:
    ranks = group()
    CALLS[names[ranks.rank]](ranks)


@pytest.mark.parametrize(
    ("first", "second", "remedy"),
    [
        ("gather 2", "gather 1", "drop_last=True"), ("gather 2", "gather many", ""), ("reduce", "reduce many", ""),
        ("reduce", "reduce max", ""), ("reduce", "barrier", "is_global_zero"), ("barrier", "broadcast", ""),
        ("objects", "gather many", ""), ("broadcast", "reduce", ""),
    ],
)  # fmt: skip
def test_different_calls_raise_on_all_ranks(first: str, second: str, remedy: str, world2: World) -> None:
    """They ended in an abort of Gloo in C++ that named no call, or waited until the timeout."""
    words = r"ranks have made different calls: rank 0: .*test_checked_calls.py:\d+ in .*; rank 1: .* at "
    for error in world2.run_raising(RuntimeError, words, call_own, first, second):
        assert remedy in str(error)


def values(ranks: MeteredGroup, dtype: torch.dtype, size: int) -> list[Any]:
    rank = ranks.rank
    mine = (torch.arange(size) + 10 * rank).to(dtype)
    reductions = ["sum", "mean", "max", "min", "prod", dist.ReduceOp.SUM]
    checked = [ranks.all_reduce(mine, reduction, checked="reduce").tolist() for reduction in reductions]
    plain = [ranks.all_reduce(mine, reduction).tolist() for reduction in reductions]
    return [checked == plain, ranks.all_gather(mine).tolist(), ranks.gather_objects((rank, "x" * size))]


SIZES, DTYPES = (0, 2, 100), (torch.float64, torch.bfloat16, torch.int64)


def all_values() -> list[Any]:
    ranks = group()
    found = [values(ranks, dtype, size) for dtype in DTYPES for size in SIZES]
    return [*found, *(ranks.broadcast_object((src, ranks.rank, "x" * size), src) for size in SIZES for src in range(2))]


def test_values(world2: World) -> None:
    """Small ones travel in the table, others behind it."""
    expected: list[Any] = [
        [
            True,
            [(torch.arange(size) + 10 * rank).to(dtype).tolist() for rank in range(2)],
            [(rank, "x" * size) for rank in range(2)],
        ]
        for dtype in DTYPES
        for size in SIZES
    ]
    expected += [(src, src, "x" * size) for size in SIZES for src in range(2)]
    assert world2.run(all_values) == [expected] * 2
