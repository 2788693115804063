"""Plans of tensor splits as text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from lightning_multigpu.planning.numbers import size
from lightning_multigpu.planning.split_plan import SplitBlocks, SplitPlan


def summary(plan: SplitPlan) -> str:
    """What a run says about its split: kinds of blocks, what stays whole and why, parameters and memory per rank."""
    lines = [f"tensor_split over {plan.num_ranks} ranks:"]
    for blocks in plan.blocks:
        lines += _block(blocks)
    lines += [*_left(plan), *(f"  {line}" for line in _held(plan))]
    return "\n".join(lines)


def _block(blocks: SplitBlocks) -> Iterator[str]:
    yield f"  {blocks.num_blocks} x {blocks.shape}: {blocks.kind}"
    yield f"    parameters {size(blocks.whole_bytes)}, of a rank {size(blocks.rank_bytes)}"


def _held(plan: SplitPlan) -> Iterator[str]:
    """The memory of one device and of each rank; ranks that hold as much as the one before share its line."""
    yield f"one device: {plan.one_device.kinds}, together {size(plan.one_device.total)}"
    for held, ranks in groupby(enumerate(plan.ranks), key=lambda pair: pair[1]):
        first, *others = (rank for rank, _ in ranks)
        which = f"ranks {first}-{others[-1]}, each" if others else f"rank {first}"
        yield f"{which}: {held.kinds}, together {size(held.total)}"


def _left(plan: SplitPlan) -> Iterator[str]:
    for each in plan.whole:
        yield f"  whole: {each.num_blocks} x {each.shape}: {each.names} ({each.reason})"
