"""One rank of an MPI job: medians of all-reduces, written by the first one. Needs mpi4py and numpy, and no torch.

``mpiexec -n 2 python benchmarks/mpi_rank.py RESULTS 'KIB:BLOCKS:CALLS,...'``
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import numpy
from mpi4py import MPI


def main() -> None:
    path, rounds = sys.argv[1:]
    world = MPI.COMM_WORLD
    medians: dict[str, float] = {}
    for text in rounds.split(","):
        size_kib, blocks, calls = (int(number) for number in text.split(":"))
        gradients = numpy.ones(size_kib * 256, dtype=numpy.float32)
        seconds = []
        for block in range(blocks + 1):
            world.Barrier()
            for _ in range(calls):
                start = time.perf_counter()
                world.Allreduce(MPI.IN_PLACE, gradients)
                if block:
                    seconds.append(time.perf_counter() - start)
            gradients.fill(1.0)
        medians[str(size_kib)] = statistics.median(seconds)
    if world.rank == 0:
        Path(path).write_text(json.dumps({"library": MPI.Get_library_version().split("\n")[0], "medians": medians}))


if __name__ == "__main__":
    main()
