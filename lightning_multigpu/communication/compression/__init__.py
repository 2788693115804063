"""Compression of the gradients that are sent between hosts."""

from lightning_multigpu.communication.compression.all_reduce import CompressedAllReduce
from lightning_multigpu.communication.compression.compressors import Compressor
from lightning_multigpu.communication.compression.factory import COMPRESSORS, make_compressor

__all__ = [
    "COMPRESSORS",
    "CompressedAllReduce",
    "Compressor",
    "make_compressor",
]
