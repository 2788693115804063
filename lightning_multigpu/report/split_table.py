"""Plans of tensor splits as text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Console

from lightning_multigpu.planning.numbers import size
from lightning_multigpu.planning.split_plan import SplitBlocks, SplitPlan
from lightning_multigpu.report.terminal import say


def summary(plan: SplitPlan) -> str:
    """What a run says about its split: kinds of blocks, what stays whole and why, parameters and memory per rank."""
    lines = [f"tensor_split over {plan.num_ranks} ranks:"]
    for blocks in plan.blocks:
        lines += _block(blocks)
    lines += [*_left(plan), *(f"  {line}" for line in _held(plan))]
    return "\n".join(lines)


def print_plan(console: Console, plan: SplitPlan) -> None:
    """Prints the blocks with their communication, what stays whole and why, and the memory of each rank."""
    lines = [f"Each split layer over {plan.num_ranks} ranks; communication of one block and the first batch:"]
    for blocks in plan.blocks:
        ways = (f"{direction} {_traffic(blocks, direction)}" for direction in ("forward", "backward"))
        sent = sum(each.sent_bytes for each in blocks.traffic)
        formula = blocks.formula_bytes(plan.num_ranks)
        lines += [
            *_block(blocks),
            f"    {', '.join(ways)}; a rank sends {size(sent)}, {sent / formula:.2f} x two all-reduces of the output"
            if formula
            else f"    {', '.join(ways)}; a rank sends {size(sent)}",
        ]
    say(console, *lines, *_left(plan), *_held(plan))


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
    for note in plan.notes:
        yield f"  {note}"


def _traffic(blocks: SplitBlocks, direction: str) -> str:
    found = [each for each in blocks.traffic if each.direction == direction]
    return (
        " and ".join(f"{each.count} {each.operation} of {size(each.size_bytes / each.count)}" for each in found) or "0"
    )
