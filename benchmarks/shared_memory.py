"""All-reduce on one host: shared memory against the ring and against torch's own over Gloo.

    python -m benchmarks.shared_memory [--ranks 2 4] [--chunk-kib 1024 2048]

Prints the machine, the versions, and for each size the median time of a call and its ratio to Gloo's. The candidates
take turns, a block of calls each; every rank has one intra-op thread. ``--chunk-kib`` compares sizes of chunks.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from lightning_multigpu.communication.ring import RingAllReduce
from lightning_multigpu.communication.shared_memory.host_all_reduce import DEFAULT_CHUNK_BYTES, SharedMemoryAllReduce

BASELINE = "gloo"
# Size in KiB: blocks of each candidate, calls in a block.
ROUNDS = {4: (30, 20), 64: (30, 20), 1024: (20, 10), 16 * 1024: (12, 2), 64 * 1024: (8, 1)}

Samples = dict[tuple[int, str], list[float]]


def measure(rank: int, num_ranks: int, chunks_kib: list[int], directory: str) -> None:
    """One rank; the first one prints the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=num_ranks)
    group = dist.new_group(backend="gloo")
    shared = {
        f"shared memory, {chunk_kib} KiB": SharedMemoryAllReduce(group, chunk_bytes=chunk_kib << 10)
        for chunk_kib in chunks_kib
    }
    candidates: dict[str, Callable[[Tensor], object]] = {
        BASELINE: lambda tensor: dist.all_reduce(tensor, group=group),
        "ring": RingAllReduce(group),
        **shared,
    }
    samples: Samples = {}
    for size_kib, (blocks, calls) in ROUNDS.items():
        tensor = torch.zeros(size_kib << 8)
        for block in range(blocks + 1):
            for name, all_reduce in candidates.items():
                dist.barrier(group)
                for _ in range(calls):
                    start = time.perf_counter()
                    all_reduce(tensor)
                    if block > 0:  # the first one warms up
                        samples.setdefault((size_kib, name), []).append(time.perf_counter() - start)
    if rank == 0:
        print_table(num_ranks, list(candidates), samples)
    dist.barrier(group)
    for candidate in shared.values():
        candidate.close()
    dist.destroy_process_group()


def print_table(num_ranks: int, names: list[str], samples: Samples) -> None:
    """One line a size: median in us, quartiles in brackets, ratio to Gloo's median."""
    print(f"\n{num_ranks} ranks")
    for size_kib in ROUNDS:
        baseline = statistics.median(samples[size_kib, BASELINE])
        cells = []
        for name in names:
            low, middle, high = (1e6 * value for value in statistics.quantiles(samples[size_kib, name], n=4))
            cells.append(f"{name} {middle:.0f} us ({low:.0f} to {high:.0f}) = {middle / baseline / 1e6:.3f}")
        print(f"{size_kib:6d} KiB: " + "; ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--chunk-kib", type=int, nargs="+", default=[DEFAULT_CHUNK_BYTES >> 10])
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
          f"Python {platform.python_version()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; "
          f"load {os.getloadavg()[0]:.1f} before")  # fmt: skip
    for num_ranks in options.ranks:
        with tempfile.TemporaryDirectory() as directory:
            mp.spawn(measure, (num_ranks, options.chunk_kib, directory), nprocs=num_ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
