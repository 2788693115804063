"""The plan of a tensor split: the blocks of layers that are split, each rank's memory, and each block's traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_multigpu.planning.pipelines.timeline import HeldBytes

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class BlockTraffic:
    """Collectives of one operation in one pass through a block.

    ``size_bytes`` are those of the whole tensors of all collectives, ``sent_bytes`` what each rank sends in a ring.
    """

    direction: Direction
    operation: str
    count: int
    size_bytes: int
    sent_bytes: float


@dataclass(frozen=True)
class SplitBlocks:
    """Blocks of one kind.

    Attributes:
        shape: "attention", for example.
        kind: the names of their layers, with * for numbers.
        whole_bytes: bytes of all blocks' parameters on one device.
        rank_bytes: bytes of the first rank's parts of these parameters.
        traffic: one block's traffic in the first batch.
    """

    shape: str
    kind: str
    num_blocks: int
    whole_bytes: int
    rank_bytes: int
    traffic: Sequence[BlockTraffic]


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
