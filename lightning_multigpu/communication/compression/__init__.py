"""What travels between hosts in place of float32 gradients. Knows torch, never Lightning."""

from lightning_multigpu.communication.compression.all_reduce import CompressedAllReduce
from lightning_multigpu.communication.compression.compression_statistics import CompressionStatistics
from lightning_multigpu.communication.compression.compressor import Compressor
from lightning_multigpu.communication.compression.factory import COMPRESSORS, make_compressor
from lightning_multigpu.communication.compression.pieces import Piece, cut, whole_bounds

__all__ = [
    "COMPRESSORS",
    "CompressedAllReduce",
    "CompressionStatistics",
    "Compressor",
    "Piece",
    "cut",
    "make_compressor",
    "whole_bounds",
]
