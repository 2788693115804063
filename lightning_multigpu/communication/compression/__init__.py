"""Compression of the gradients that are sent between hosts."""

from lightning_multigpu.communication.compression.all_reduce import CompressedAllReduce
from lightning_multigpu.communication.compression.compressors import COMPRESSORS, Compressor, make_compressor

__all__ = [
    "COMPRESSORS",
    "CompressedAllReduce",
    "Compressor",
    "make_compressor",
]
