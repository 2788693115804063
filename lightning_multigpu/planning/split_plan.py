"""The plan of a tensor split: the blocks of layers that are split or stay whole, and each rank's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from lightning_multigpu.planning.numbers import size
from lightning_multigpu.planning.pipelines.timeline import HeldBytes


@dataclass(frozen=True)
class SplitBlocks:
    """Blocks of one kind.

    Attributes:
        shape: "attention", for example.
        names: of their layers, with * for numbers.
        whole_bytes: bytes of all blocks' parameters on one device.
        rank_bytes: bytes of the first rank's parts of these parameters.
        reason: why they stay whole; empty if they are split.
    """

    shape: str
    names: str
    num_blocks: int
    whole_bytes: int
    rank_bytes: int
    reason: str = ""


@dataclass(frozen=True)
class SplitPlan:
    """A tensor split over ``num_ranks``.

    Attributes:
        one_device: bytes that one device would hold in training.
        ranks: bytes that each rank of the first group, or of the first pipeline, holds.
    """

    num_ranks: int
    blocks: Sequence[SplitBlocks]
    one_device: HeldBytes
    ranks: Sequence[HeldBytes]

    def __str__(self) -> str:
        """What a run says: kinds of blocks, what stays whole and why, parameters and memory of each rank."""
        lines = [f"tensor_split over {self.num_ranks} ranks:"]
        for each in self.blocks:
            of_kind = f"{each.num_blocks} x {each.shape}: {each.names}"
            sizes = f"parameters {size(each.whole_bytes)}, of a rank {size(each.rank_bytes)}"
            lines += [f"  whole: {of_kind} ({each.reason})"] if each.reason else [f"  {of_kind}", f"    {sizes}"]
        lines.append(f"  one device: {self.one_device.kinds}, together {size(self.one_device.total)}")
        for held, ranks in groupby(enumerate(self.ranks), key=lambda pair: pair[1]):
            first, *others = (rank for rank, _ in ranks)
            which = f"ranks {first}-{others[-1]}, each" if others else f"rank {first}"
            lines.append(f"  {which}: {held.kinds}, together {size(held.total)}")
        return "\n".join(lines)
