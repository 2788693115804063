"""Plans of tensor splits as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console

from lightning_multigpu.planning.numbers import size
from lightning_multigpu.planning.split_plan import SplitBlocks, SplitPlan


def summary(plan: SplitPlan) -> str:
    """What a run says about its split: kinds of blocks, what stays whole and why, and the bytes of parameters."""
    lines = [f"tensor_split over {plan.num_ranks} ranks:"]
    lines += [f"  {blocks.num_blocks} x {blocks.shape}: {blocks.kind}" for blocks in plan.blocks]
    lines += _left(plan)
    own, whole = plan.ranks[0].parameters_bytes, plan.one_device.parameters_bytes
    lines.append(f"  parameters of a rank: {size(own)} of {size(whole)}")
    return "\n".join(lines)


def print_plan(console: Console, plan: SplitPlan) -> None:
    """Prints the blocks with their communication, what stays whole and why, and the memory of each rank."""
    lines = [f"Each split layer over {plan.num_ranks} ranks; communication of one block and the first batch:"]
    for blocks in plan.blocks:
        ways = (f"{direction} {_traffic(blocks, direction)}" for direction in ("forward", "backward"))
        sent = sum(each.sent_bytes for each in blocks.traffic)
        formula = blocks.formula_bytes(plan.num_ranks)
        lines += [
            f"  {blocks.num_blocks} x {blocks.shape}: {blocks.kind}",
            f"    parameters {size(blocks.whole_bytes)}, of a rank {size(blocks.rank_bytes)}",
            f"    {', '.join(ways)}; a rank sends {size(sent)}, {sent / formula:.2f} x two all-reduces of the output"
            if formula
            else f"    {', '.join(ways)}; a rank sends {size(sent)}",
        ]
    lines += _left(plan)
    held = [("one device", plan.one_device), *((f"rank {number}", each) for number, each in enumerate(plan.ranks))]
    lines += [
        f"{name}: parameters {size(each.parameters_bytes)}, gradients {size(each.gradients_bytes)}, "
        f"optimizer {size(each.optimizer_bytes)}"
        for name, each in held
    ]
    console.print("\n".join(lines), highlight=False, soft_wrap=True, markup=False)


def as_json(plan: SplitPlan) -> dict[str, Any]:
    """The object of ``--json``, whose keys :mod:`lightning_multigpu.commands.tensor_plan` describes."""
    return asdict(plan)


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
