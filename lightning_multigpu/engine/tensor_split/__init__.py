"""Tensor parallelism: layers whose weights and work are split over ranks.

The layers and functions below are usable with a process group alone, without a Trainer::

    group = TensorGroup(dist.group.WORLD)
    block = nn.Sequential(ColumnSplitLinear(512, 2048, group=group), nn.GELU(), RowSplitLinear(2048, 512, group=group))

In their docstrings N is the number of ranks, and bytes are those of the whole tensor that a collective sums or makes;
:class:`TensorGroup` lists the share that a rank sends.
"""

from lightning_multigpu.engine.tensor_split.attention import SplitMultiheadAttention
from lightning_multigpu.engine.tensor_split.layers import (
    ColumnSplitLinear,
    RowSplitLinear,
    VocabSplitEmbedding,
    gather_sequence,
    split_sequence,
    summed,
)
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup

__all__ = [
    "ColumnSplitLinear",
    "RowSplitLinear",
    "SplitMultiheadAttention",
    "TensorGroup",
    "VocabSplitEmbedding",
    "gather_sequence",
    "split_sequence",
    "summed",
]
