"""The plan of a tensor split: the blocks of layers that are split, and each rank's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_multigpu.planning.pipelines.timeline import HeldBytes


@dataclass(frozen=True)
class SplitBlocks:
    """Blocks of one kind.

    Attributes:
        shape: "attention", for example.
        kind: the names of their layers, with * for numbers.
        whole_bytes: bytes of all blocks' parameters on one device.
        rank_bytes: bytes of the first rank's parts of these parameters.
    """

    shape: str
    kind: str
    num_blocks: int
    whole_bytes: int
    rank_bytes: int


@dataclass(frozen=True)
class WholeBlocks:
    """Blocks that are not split, and the reason."""

    shape: str
    names: str
    num_blocks: int
    reason: str


@dataclass(frozen=True)
class SplitPlan:
    """A tensor split over ``num_ranks``.

    Attributes:
        one_device: bytes that one device would hold in training.
        ranks: bytes that each rank of the first group, or of the first pipeline, holds.
    """

    num_ranks: int
    blocks: Sequence[SplitBlocks]
    whole: Sequence[WholeBlocks]
    one_device: HeldBytes
    ranks: Sequence[HeldBytes]
