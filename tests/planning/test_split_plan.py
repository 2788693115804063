"""What a run prints of its tensor split."""

from collections.abc import Sequence

from lightning_multigpu.planning.pipelines.timeline import HeldBytes
from lightning_multigpu.planning.split_plan import SplitBlocks, SplitPlan

BLOCKS = SplitBlocks("attention", "layers.*.(qkv, out)", 4, 8_000, 4_100)


def lines(ranks: Sequence[HeldBytes]) -> list[str]:
    left = SplitBlocks("first, second", "head.(0, 2)", 1, 500, 500, "relu needs the outputs of all ranks")
    return str(SplitPlan(2, [BLOCKS, left], HeldBytes(9_000, 9_000, 18_000), ranks)).splitlines()


def test_parameters_and_memory_of_each_rank() -> None:
    """The summary told the parameters of the first rank alone, and no memory."""
    assert lines([HeldBytes(5_100, 5_100, 10_200), HeldBytes(5_000, 5_000, 10_000)]) == [
        "tensor_split over 2 ranks:",
        "  4 x attention: layers.*.(qkv, out)",
        "    parameters 8.00 kB, of a rank 4.10 kB",
        "  whole: 1 x first, second: head.(0, 2) (relu needs the outputs of all ranks)",
        "  one device: parameters 9.00 kB, gradients 9.00 kB, optimizer 18.0 kB, together 36.0 kB",
        "  rank 0: parameters 5.10 kB, gradients 5.10 kB, optimizer 10.2 kB, together 20.4 kB",
        "  rank 1: parameters 5.00 kB, gradients 5.00 kB, optimizer 10.0 kB, together 20.0 kB",
    ]


def test_ranks_that_hold_as_much_share_a_line() -> None:
    stages = [HeldBytes(5_000, 5_000, 0)] * 2 + [HeldBytes(4_000, 4_000, 0)]
    assert [line.partition(", gradients")[0] for line in lines(stages)[-2:]] == [
        "  ranks 0-1, each: parameters 5.00 kB",
        "  rank 2: parameters 4.00 kB",
    ]
