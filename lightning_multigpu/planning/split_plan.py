"""The plan of a tensor split: the blocks of layers that are split, each rank's memory, and each block's traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_multigpu.planning.timeline import HeldBytes

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class BlockTraffic:
    """Collectives of one operation in one pass through a block.

    Attributes:
        direction: of the pass.
        operation: as in ``torch.distributed``.
        count: the number of collectives.
        size_bytes: of the whole tensors of all of them.
        sent_bytes: by each rank, in a ring.
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
        num_blocks: how many there are.
        whole_bytes: of the parameters of all of them, on one device.
        rank_bytes: of the first rank's parts of these.
        traffic: of one block, in the first batch.
        activation_bytes: of one block's output in the first batch.
    """

    shape: str
    kind: str
    num_blocks: int
    whole_bytes: int
    rank_bytes: int
    traffic: Sequence[BlockTraffic]
    activation_bytes: int

    def formula_bytes(self, num_ranks: int) -> float:
        """Bytes that a rank sends by Megatron-LM's formula: an all-reduce of the output forward, and one backward."""
        return 2 * 2 * (num_ranks - 1) / num_ranks * self.activation_bytes


@dataclass(frozen=True)
class WholeBlocks:
    """Blocks that stay whole, and why."""

    shape: str
    names: str
    num_blocks: int
    reason: str


@dataclass(frozen=True)
class SplitPlan:
    """A tensor split.

    Attributes:
        num_ranks: among which each layer is split.
        blocks: that are split.
        whole: blocks that were tried and stay whole.
        notes: further lines for the user.
        one_device: what one device holds in training.
        ranks: what each rank of the first group holds, or of the first pipeline.
    """

    num_ranks: int
    blocks: Sequence[SplitBlocks]
    whole: Sequence[WholeBlocks]
    notes: Sequence[str]
    one_device: HeldBytes
    ranks: Sequence[HeldBytes]
